"""Run by torchrun in a test: two ranks that continue prompts; rank 0 writes the tokens."""
import json
import sys

import torch.distributed as dist
from rank_work import complete

from gptoss_lab.engine import SamplingParams
from gptoss_lab.parallel import Plan, from_torchrun

own = from_torchrun(timeout=30)
plan = Plan.parse(sys.argv[2])
own.agree("plan", str(plan))
found = complete(own, sys.argv[1], plan, json.loads(sys.argv[3]), SamplingParams(temperature=0, max_new_tokens=6))
if own.rank == 0:
    with open(sys.argv[4], "w", encoding="utf-8") as file:
        json.dump([completion.tokens for completion in found.values()], file)
dist.destroy_process_group()
