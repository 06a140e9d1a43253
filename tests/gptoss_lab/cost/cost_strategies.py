"""Random models, plans and precisions for the properties."""
from hypothesis import strategies as st

from gptoss_lab.config import preset
from gptoss_lab.cost import Precision, all_plans


def models():
    return st.sampled_from(["gpt-oss-20b", "gpt-oss-120b"]).map(preset)


def plans():
    return st.sampled_from([plan for world in (1, 2, 4, 8) for plan in all_plans(world)])


def precisions():
    return st.builds(
        Precision, experts=st.sampled_from(["mxfp4", "fp8", "bf16"]), dense=st.sampled_from(["fp8", "bf16"]),
        kv=st.sampled_from(["bf16", "fp8"]), mxfp4_unit=st.sampled_from(["bf16", "fp8"]),
    )
