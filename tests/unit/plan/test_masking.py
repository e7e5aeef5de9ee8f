"""What is shown of text that may hold secrets."""

from __future__ import annotations

import pytest

from skymagic.errors import RequestError
from skymagic.plan.image import Image, explain_unsatisfied
from skymagic.plan.masking import masked, masked_command, secret_values
from skymagic.plan.planning import plan
from skymagic.plan.plans import Inventory
from skymagic.plan.requests import PluginSpec, PoolRequest, ShellRequest
from tests.lab.golden import Golden

URL = "https://me:s3cret@pypi.example/simple"
PRIVATE = "tool @ https://me:s3cret@example.org/tool-1.0.tar.gz"


def test_passwords_in_urls(golden: Golden) -> None:
    assert masked(f"Looking in {URL}") == "Looking in https://****@pypi.example/simple"
    golden(masked("git+ssh://git@h/x and a@b"))
    assert masked("https://me:at@the-end@h/x") == "https://****@h/x"


@pytest.mark.parametrize(
    "text",
    [
        "hub login --token s3cret", "hub login --token=s3cret", "TOKEN=s3cret run", "export API_KEY='s3cret' && x",
        'curl -d "password: s3cret"', "wandb login s3cret-value", "{'token': 's3cret'}",
    ],
)  # fmt: skip
def test_commands(text: str) -> None:
    shown = masked_command(text, ["s3cret-value"])
    assert "s3cret" not in shown
    assert "****" in shown
    assert shown.split()[0][:3] == text[:3]


def test_other_words_stay() -> None:
    for text in (
        "pip install tokenizers keyring",
        "python -c 'print(tokens)'",
        "git config --token --x",
        "tokenizer = y",
    ):
        assert masked_command(text, ["", "1", "y"]) == text


def test_values_of_variables() -> None:
    variables = {
        "HF_TOKEN": "a",
        "aws_secret_access_key": "b",
        "PLAIN": "c",
        "MINE": "d",
        "PATH": "e",
    }
    assert secret_values(["MINE"], variables) == {"a", "b", "d"}


def test_a_repr_and_a_plan_hold_none() -> None:
    image = Image(pip=(PRIVATE, "numpy"), pip_indexes=(URL,), env={"WANDB": "s3cret"})
    request = PoolRequest(
        image=image,
        env=(("A", "s3cret"),),
        plugins=(PluginSpec("huggingface", {"token": "s3cret"}),),
        pip=("x",),
    )
    assert repr(image) == (
        "Image(pip=('tool @ https://****@example.org/tool-1.0.tar.gz', 'numpy'), "
        "pip_indexes=('https://****@pypi.example/simple',), env={'WANDB': '****'})"
    )
    made = plan(request, Inventory("here", 8, 16.0))
    for text in (
        repr(request),
        str(request),
        repr(made),
        made.text(),
        repr(ShellRequest(env=(("A", "s3cret"),))),
    ):
        assert "s3cret" not in text
    assert request.secret_values({}) == {"s3cret"}


def test_mistakes_hold_none() -> None:
    for pip in ((PRIVATE + " ;;",), ("tool==1", "tool==2", PRIVATE)):
        with pytest.raises(RequestError) as refused:
            Image(pip=pip)
        assert "s3cret" not in str(refused.value)
    image = Image(pip=("tool", PRIVATE), pip_indexes=(URL,))
    (sentence, *_) = explain_unsatisfied(image, {})
    assert "--extra-index-url https://****@pypi.example/simple" in sentence
    assert "s3cret" not in " ".join([*explain_unsatisfied(image, {}), *image.repeated()])
