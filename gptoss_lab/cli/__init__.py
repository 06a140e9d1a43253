"""The command line `gptoss-lab`. Each command is a thin file over the library; nothing heavy is imported to show help.

    main.py             the list of commands
    errors.py           every error as one line and an exit code
    output.py           tables, bytes, lines on stderr
    options.py          options that several commands share
    loading.py          a model and the engine in front of it
    speed.py            tokens per second
    machine.py          capabilities
    checkpoints.py      inspect, synth, convert
    generation.py       generate: token ids in, token ids out
    chat.py             chat: Harmony in front of the engine
    serve.py            serve: the JSON API in front of the engine
    turn.py             how a turn is printed while it is written
    results.py          results diff
    parallel.py         plans, bench comm, bench sweep
    speculation.py      bench speculation
    bench.py            bench convert, whole, attention, ...
"""
from gptoss_lab.cli.main import main

__all__ = ["main"]
