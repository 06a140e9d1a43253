"""How the nano checkpoint is made, and what it is then used to measure. Nothing that runs a model imports this package.

    python -m gptoss_lab.train.run --out DIR --minutes 9
    python -m gptoss_lab.train.study --checkpoint DIR/nano.safetensors --out FILE.jsonl

    dialogues/        what is learned: generated Harmony dialogues, split by problem into training and held out
    vocabulary.py     the tokens that have rows of their own, and the row for all others
    batches.py        packed batches, each a function of the seed and its number
    model.py          gpt-oss with gradients; attention.py, experts.py: its two parts that need thought
    quantise.py       weights in the form of the file, inside training
    mtp.py            heads that predict further ahead
    optimiser.py      Muon and AdamW
    loop.py           one phase of training; trainees.py: what a phase trains
    generate.py       greedy generation in batches
    evaluate.py       exact match by task, well-formed Harmony; measure.py: the rest that is measured
    export.py         a trained model as released tensors
    compact.py        the file that is shipped, and its expansion to a standard checkpoint
    served.py         the lab's engine on the expanded checkpoint against the trained model
    settings.py, card.py, run.py
    study/            what each choice of precision costs the trained model
"""
