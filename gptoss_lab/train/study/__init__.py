"""The accuracy study: what each choice of precision, and each mistake, costs a trained checkpoint.

    python -m gptoss_lab.train.study --checkpoint PATH --out FILE.jsonl --problems 1000
    python -m gptoss_lab.train.study --checkpoint PATH --out FILE.jsonl --problems 1000 --identical

    variants.py     the table of variants: a new one is one entry there
    backends.py     operations with one thing changed, which nothing but a variant can ask for
    caches.py       keys and values in e4m3
    source.py       a checkpoint with equal vocabulary rows held once, other constants, or no sinks
    measure.py      answers written by the engine; loss, divergence and experts on given answers
    names.py        what measures and variants are called
    numbers.py      intervals and the paired test
    rows.py         what was measured as result rows
    verdicts.py     result rows as sentences: which of the post's claims show
    __main__.py     the command
"""
