"""Images add up, disagree in words, and say what an environment lacks."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from skymagic.errors import RequestError
from skymagic.plan.image import Image, PipIndex, explain_unsatisfied
from tests.lab.golden import Golden


def mistakes(**fields: object) -> str:
    with pytest.raises(RequestError) as refused:
        Image(**fields)  # type: ignore[arg-type]
    return "\n".join(refused.value.mistakes)


def test_lists_keep_their_order_and_drop_repetitions() -> None:
    image = Image(pip=["torch", "numpy", "torch", " numpy "], apt=["git", "curl", "git"])  # type: ignore[arg-type]
    assert image.pip == ("torch", "numpy")
    assert image.apt == ("git", "curl")


def test_merge_appends_in_order() -> None:
    base = Image(pip=("numpy",), pip_indexes=("https://a",), env={"A": "1"}, excludes=("*.bin",))
    torch = Image(pip=("torch>=2.3", "numpy"), pip_indexes=("https://b",), env={"B": "2", "A": "1"})
    merged = base.merge(torch, Image(python="3.12"))
    assert merged.pip == ("numpy", "torch>=2.3")
    assert merged.pip_indexes == ("https://a", "https://b")
    assert list(merged.env.items()) == [("A", "1"), ("B", "2")]
    assert merged.python == "3.12"
    assert merged.excludes == ("*.bin",)
    assert base.pip == ("numpy",), "an image is a value; merging leaves it alone"


def test_merging_nothing_changes_nothing() -> None:
    image = Image(python="3.11", pip=("a",), env={"A": "1"}, includes=("src",))
    assert image.merge() == image == image.merge(Image()) == Image().merge(image)


def test_replace_as_plugins_use_it(golden: Golden) -> None:
    image = Image(pip=("numpy",), env={"A": "1"})
    image = image.replace(pip=(*image.pip, "torch==2.3.0"), env={**image.env, "B": "2"})
    assert image.pip == ("numpy", "torch==2.3.0")
    assert image.env == {"A": "1", "B": "2"}
    with golden.raises(RequestError):
        image.replace(pip=(*image.pip, "torch==2.4.0"))


@pytest.mark.parametrize(
    "pip",
    [
        ("torch==2.3", "torch==2.4"),
        ("torch==2.3", "torch>=2.4"),
        ("Torch_Vision==0.18", "torch-vision<0.18"),
        ("torch==2.3,!=2.3",),
    ],
)
def test_pinned_versions_that_contradict(golden: Golden, pip: tuple[str, ...]) -> None:
    golden(mistakes(pip=pip))


@pytest.mark.parametrize(
    "pip",
    [
        ("torch", "torch==2.3"),
        ("torch>=2.3", "torch==2.4"),
        ("torch==2.4", "torch==2.4.0"),
        ("torch==2.*", "torch==2.4"),
        ('tomli==1; python_version < "3.11"', 'tomli==2; python_version >= "3.11"'),
    ],
)
def test_requirements_that_agree(pip: tuple[str, ...]) -> None:
    assert Image(pip=pip).pip == pip


def test_repetitions_that_agree_are_reported(golden: Golden) -> None:
    image = Image(pip=("torch", "numpy", "torch>=2.3", "Torch<3"))
    golden(image.repeated())
    assert Image(pip=("torch", "numpy")).repeated() == []


def test_all_mistakes_at_once() -> None:
    told = mistakes(
        python="three",
        pip=("torch=2.3", "-r requirements.txt", "a==1", "a==2"),
        apt=("--allow", "git"),
        env={"1A": "x", "B": 3, "C": "a\0b"},
    )
    for part in (
        "'three'",
        "'torch=2.3'",
        "'-r requirements.txt'",
        "a==1, a==2",
        "'--allow'",
        "'1A'",
        " B ",
        " C ",
    ):
        assert part in told


def test_conflicting_images_name_fields_but_no_values(
    golden: Golden,
) -> None:
    with pytest.raises(RequestError) as refused:
        Image(python="3.11", env={"TOKEN": "s3cret"}).merge(
            Image(python="3.12", env={"TOKEN": "other"})
        )
    told = str(refused.value)
    golden(told)
    golden(told)
    assert "s3cret" not in told


@pytest.mark.parametrize("value", ["numpy", 3, None, ["numpy", 3]])
def test_a_list_that_is_none(golden: Golden, value: object) -> None:
    golden(mistakes(pip=value))


def test_slips_of_the_keyboard(golden: Golden) -> None:
    golden(mistakes(env="A=1"))
    golden(mistakes(env=None))
    golden(mistakes(python=3.12))
    golden(mistakes(python=""))
    golden(mistakes(python="bin/python"))
    assert Image(python="/opt/conda envs/x/bin/python").python == "/opt/conda envs/x/bin/python"


@pytest.mark.parametrize(
    "text", ["a\nb", "", "torch>", "torch==", "to rch", "torch\x1b[31m", "-e .", "ü"]
)
def test_no_requirement(golden: Golden, text: str) -> None:
    golden(mistakes(pip=[text]), hide=["(?<=is not a requirement: ).*"])  # packaging's words


@pytest.mark.parametrize(
    "text",
    [
        "git+https://example.org/x.git@main", "https://example.org/x-1.0-py3-none-any.whl",
        "./wheels/x-1.0-py3-none-any.whl", "x-1.0-py3-none-any.whl", "~/x", "jax[cuda12,extra]>=0.4",
        "name @ https://example.org/name.zip",
    ],
)  # fmt: skip
def test_places_and_extras(text: str) -> None:
    assert Image(pip=(text,)).pip == (text,)


def test_it_is_a_value() -> None:
    image = Image(pip=("torch",), env={"A": "1"}, includes=("src",))
    assert {image: 1}[Image(pip=("torch",), env={"A": "1"}, includes=("src",))] == 1
    assert pickle.loads(pickle.dumps(image)) == image
    assert Image(**json.loads(json.dumps(asdict(image)))) == image


# ---------------------------------------------------------------------------------------------- what is missing


def test_nothing_is_missing() -> None:
    image = Image(pip=("torch>=2.3", "Scikit_Learn", "jax[cuda12]==0.10.*"))
    assert (
        explain_unsatisfied(image, {"torch": "2.13.0+cpu", "scikit-learn": "1.7", "JAX": "0.10.2"})
        == []
    )


def test_missing_package_is_named_with_install_command(golden: Golden) -> None:
    image = Image(
        pip=("torch==2.99", "numpy", "left-pad"), pip_indexes=("https://example.org/whl/cpu",)
    )
    sentences = explain_unsatisfied(image, {"torch": "2.13.0+cpu", "numpy": "2.4.6"})
    assert len(sentences) == 2
    golden(sentences[0])
    golden(sentences[0])
    golden(sentences[1])
    assert "`%pip install left-pad " in sentences[1]


@pytest.mark.parametrize(
    "place",
    ["torch @ https://me:s3cret@example.org/t.whl", "./local.whl", "git+https://example.org/x.git"],
)
def test_unknown_origin_of_a_package(golden: Golden, place: str) -> None:
    (sentence,) = explain_unsatisfied(Image(pip=(place,)), {"torch": "2.13.0"})
    assert sentence.startswith(place.replace("me:s3cret", "****"))
    golden(sentence)
    golden(sentence)
    assert "s3cret" not in sentence


def test_a_package_from_a_url_that_is_not_installed_at_all() -> None:
    (sentence,) = explain_unsatisfied(Image(pip=("torch @ https://example.org/torch",)), {})
    assert re.match(
        r'torch is not installed here: run `%pip install "torch ?@ https://example.org/torch"`',
        sentence,
    )


def test_shell_characters_are_quoted(golden: Golden) -> None:
    (sentence,) = explain_unsatisfied(Image(pip=("jax[cuda12]>=0.99",)), {})
    golden(sentence)


@pytest.mark.parametrize(
    ("requirement", "installed", "satisfied"),
    [
        ("torch==2.13.0", "2.13.0+cpu", True),
        ("torch>=2.13", "2.13.0rc1", False),
        ("torch>=2.12", "2.13.0rc1", True),
        ("torch", "2.13.0.dev1", True),
        ("torch!=2.13.0", "2.13.0", False),
        ('torch>=99; python_version < "3"', "2.13.0", True),
        ('torch>=99; python_version >= "3"', "2.13.0", False),
    ],
)
def test_versions(requirement: str, installed: str, satisfied: bool) -> None:
    assert (explain_unsatisfied(Image(pip=(requirement,)), {"torch": installed}) == []) is satisfied


@given(st.text(max_size=30))
def test_any_text_is_taken_or_refused_in_words(text: str) -> None:
    try:
        image = Image(pip=(text,))
    except RequestError:
        return
    assert all(isinstance(sentence, str) for sentence in explain_unsatisfied(image, {}))


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["==1", "==2", ">=2", "<2", ""])),
        max_size=5,
    )
)
def test_accepted_requirements_have_pins(parts: list[tuple[str, str]]) -> None:
    pip = tuple(name + constraint for name, constraint in parts)
    try:
        Image(pip=pip)
    except RequestError:
        return
    for name in "abc":
        same = [Requirement(item).specifier for item in pip if item[0] == name]
        for pin in (p.version for specifier in same for p in specifier if p.operator == "=="):
            assert all(specifier.contains(pin) for specifier in same)


def test_an_index_for_certain_packages(golden: Golden) -> None:
    scoped = PipIndex("https://me:hidden@example.org/whl/cpu", packages=["Torch", "torch.vision"])
    image = Image(
        pip=("torch==2.99", "numpy"), pip_indexes=(scoped, PipIndex(" https://a "), "https://b")
    )
    assert image.pip_indexes == (scoped, "https://a", "https://b")
    assert image.merge(Image(pip_indexes=(scoped, "https://c"))).pip_indexes == (
        *image.pip_indexes,
        "https://c",
    )
    assert scoped.must_provide("torch>=2")
    assert scoped.must_provide("Torch-Vision")
    assert not scoped.must_provide("numpy")
    assert "hidden" not in repr(image)
    torch, numpy = explain_unsatisfied(image, {})
    golden(torch)
    assert "example.org" not in numpy
    for wrong in (["torch>=2"], "torch", [3]):
        with pytest.raises(RequestError, match="packages"):
            PipIndex("https://a", packages=wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="pip_indexes"):
        Image(pip_indexes=(PipIndex("--no-index", packages=["torch"]),))
