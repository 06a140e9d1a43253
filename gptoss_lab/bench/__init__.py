"""What is measured and how: each module checks a result before it times it, and writes rows of `gptoss_lab.results`."""
