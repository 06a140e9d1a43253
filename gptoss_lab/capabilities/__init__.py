"""One look at the machine: what of the suite can run here, what fits into memory, and for the rest why not.

    from gptoss_lab.capabilities import abilities, fits, probe

    machine = probe()
    for ability in abilities(machine):
        print(ability.name, ability.can, ability.reason)
    for fit in fits(machine):
        print(fit.model, fit.form, fit.place, fit.fits, fit.note)

`probe` (machine.py) asks the operating system, `nvidia-smi` and the packages' metadata; neither torch nor CUDA is
imported, so it takes a fraction of a second and works where they are broken. What follows from a machine (abilities.py,
memory.py) is a pure function of the probed facts, so a laptop can be told what an H100 could do.

What is lost: a package that is installed but cannot be loaded looks present here. The registry of the kernels asks
again, operation by operation, when a model is loaded.
"""
from gptoss_lab.capabilities.abilities import Ability, abilities
from gptoss_lab.capabilities.machine import Gpu, Machine, probe
from gptoss_lab.capabilities.memory import Fit, cache_bytes, fits, weight_bytes

__all__ = ["Ability", "Fit", "Gpu", "Machine", "abilities", "cache_bytes", "fits", "probe", "weight_bytes"]
