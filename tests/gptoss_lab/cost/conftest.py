"""The two released models as fixtures."""
import pytest

from gptoss_lab.config import preset

MODELS = ("gpt-oss-20b", "gpt-oss-120b")


@pytest.fixture(params=MODELS)
def config(request):
    return preset(request.param)


@pytest.fixture
def b20():
    return preset("gpt-oss-20b")


@pytest.fixture
def b120():
    return preset("gpt-oss-120b")
