"""`gptoss-lab capabilities`: what this machine can run, what fits, and for the rest why not."""
from __future__ import annotations

from dataclasses import asdict

from gptoss_lab.cli.options import Json
from gptoss_lab.cli.output import print_json, print_table, size


def capabilities(json: Json = False) -> None:
    """Say what can run on this machine, what fits into its memory, and for the rest why not."""
    from gptoss_lab.capabilities import abilities, fits, probe

    machine = probe()
    can, room = abilities(machine), fits(machine)
    if json:
        print_json({
            "machine": asdict(machine), "abilities": [asdict(a) for a in can], "fits": [asdict(f) for f in room],
        })
        return
    gpus = [(f"GPU {number}", gpu.label) for number, gpu in enumerate(machine.gpus)] or [("GPU", "none")]
    print_table("This machine", ("", ""), [
        ("system", f"{machine.system}, Python {machine.python}"), ("CPU", f"{machine.cpu}, {machine.cores} cores"),
        ("memory", size(machine.ram)), ("free disk", size(machine.disk_free)), *gpus, ("driver", machine.driver),
        ("torch's CUDA", machine.torch_cuda), ("nvcc", machine.nvcc), *machine.packages.items(),
    ])
    print_table("What can run", ("", "here", ""), [(a.name, a.can, a.reason) for a in can])
    print_table("What fits", ("model", "weights as", "size", "into", "fits", ""), [
        (fit.model, fit.form, size(fit.weights), fit.place, fit.fits, fit.note) for fit in room
    ])
