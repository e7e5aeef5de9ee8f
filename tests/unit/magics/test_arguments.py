"""A magic's line becomes a request or a list of all its mistakes; nothing on it is ever evaluated."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from traitlets import TraitError
from traitlets.config import Config

from skymagic.api.logs import LogsRequest
from skymagic.api.pool_listing import StatusRequest
from skymagic.api.stopping import DownRequest
from skymagic.errors import RequestError
from skymagic.magics.arguments.cell_magics import parse_broadcast, parse_pool, parse_sh
from skymagic.magics.arguments.help import CompletionNames, complete, help_text
from skymagic.magics.arguments.line_magics import (
    AttachRequest,
    CloneRequest,
    FilesRequest,
    ForwardRequest,
    GpusRequest,
    NamesRequest,
    PipRequest,
    RanksRequest,
    parse_attach,
    parse_auto,
    parse_check,
    parse_clone,
    parse_down,
    parse_files,
    parse_forward,
    parse_gpus,
    parse_logs,
    parse_names,
    parse_pip,
    parse_ranks,
    parse_status,
)
from skymagic.magics.arguments.options import MAGICS
from skymagic.magics.arguments.parsing import Token, split
from skymagic.magics.config import SkyMagic
from skymagic.plan.accelerators import Accelerator
from skymagic.plan.requests import (
    Defaults,
    PluginSpec,
    PoolRequest,
    RunRequest,
    ShellRequest,
    plugin_specs,
)
from skymagic.plan.suggest import LazyNames
from skymagic.plan.units import AtLeast, Selection
from tests.lab.golden import Golden

parse_restart, parse_stacks, parse_vars = (
    partial(parse_ranks, f"sky_{name}") for name in ("restart", "stacks", "vars")
)
parse_push, parse_pull = partial(parse_names, "sky_push"), partial(parse_names, "sky_pull")
parse_put, parse_get = partial(parse_files, "sky_put"), partial(parse_files, "sky_get")
PARSERS: dict[str, Callable[[str], Any]] = {
    name: globals()[name.replace("sky_", "parse_")] for name in MAGICS
}


def parse_pool_toml(body: str) -> PoolRequest:
    """The body of ``%%sky_pool`` alone."""
    return parse_pool("", body=body)


def mistakes(call: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    with pytest.raises(RequestError) as refused:
        call(*args, **options)
    return list(refused.value.mistakes)


def mistake(line: str) -> str:
    """The one mistake of a broadcast's line."""
    (only_one,) = mistakes(parse_broadcast, line)
    return only_one


# --------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        ("   ", []),
        ("# only a comment", []),
        ("a b", ["a", "b"]),
        ("a  # a comment 'with a quote", ["a"]),
        ("a#b", ["a#b"]),
        ("'a b' \"c d\"", ["a b", "c d"]),
        ("x='a b'c", ["x=a bc"]),
        ('"it\'s" \'say "hi"\'', ["it's", 'say "hi"']),
        ('"a \\" b"', ['a " b']),
        ("'a\\'", ["a\\"]),
        ("a\\ b c\\#d", ["a b", "c#d"]),
        ("C:\\data\\new", ["C:\\data\\new"]),
        ("'# no comment' b", ["# no comment", "b"]),
        ("''", [""]),
        ("a;", ["a"]),
        ("a ; # silent", ["a"]),
        ("a ';'", ["a", ";"]),
        ("a;b", ["a;b"]),
        ("größe\u00a0naïve 名前", ["größe", "naïve", "名前"]),
        ("trailing\\", ["trailing\\"]),
    ],
)
def test_words_of_a_line(line: str, words: list[str]) -> None:
    tokens, wrong = split(line)
    assert [token.text for token in tokens] == words
    assert wrong == []


@pytest.mark.parametrize("line", ["'open", 'a "open', "a'b", '"ends in a backslash\\"'])
def test_a_quote_without_end(golden: Golden, line: str) -> None:
    golden(split(line)[1][0])
    golden(mistakes(parse_broadcast, line)[0])


@given(st.lists(st.text(min_size=1, max_size=8), max_size=4))
def test_quoting_brings_any_words_through(words: list[str]) -> None:
    line = " ".join('"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"' for word in words)
    tokens, wrong = split(line)
    assert tokens == [Token(word, quoted=True) for word in words]
    assert wrong == []


# ----------------------------------------------------------------------------------------------------- broadcast


def test_an_empty_line_asks_for_nothing() -> None:
    for line in ("", "  ", "# nothing", ";"):
        assert parse_broadcast(line) == RunRequest()
        assert parse_broadcast(line).pool.stated_fields() == frozenset()


def test_everything_of_a_run() -> None:
    line = "--pool train -o results -g loss,acc --head --only 0:4 -t 0,2 --push data --no-push big,huge --timeout 10m -a --fresh"
    assert parse_broadcast(line) == RunRequest(
        pool=PoolRequest(name="train"),
        output="results",
        gather=("loss", "acc"),
        head=True,
        only=Selection("0:4"),
        targets=Selection("0,2"),
        push=("data",),
        no_push=("big", "huge"),
        timeout=600.0,
        noblock=True,
        fresh=True,
    )


def test_everything_of_a_pool() -> None:
    line = (
        "train --provider ssh --num-nodes 4 --gpus a100:8 --cpus 8+ --memory 32GB+ --procs-per-node 4 "
        "--plugin torch:backend=gloo,cuda=cu124 --plugin jax --pip 'numpy>=2,<3',pandas --env A=1 --env B=x=y,z "
        "--secret HF_TOKEN --hosts gpu[1-8],ubuntu@10.0.0.7:2222 --region eu-central-1 --spot --max-price 12.5 "
        "--idle 30m --max-lifetime 8h -y --dry-run   # all of it"
    )
    assert parse_pool(line) == PoolRequest(
        name="train",
        provider="ssh",
        nodes=4,
        gpu=Accelerator("A100", 8),
        cpus=AtLeast(8, True),
        memory=AtLeast(32, True),
        procs_per_node=4,
        plugins=(PluginSpec("torch", {"backend": "gloo", "cuda": "cu124"}), PluginSpec("jax")),
        pip=("numpy>=2,<3", "pandas"),
        env=(("A", "1"), ("B", "x=y,z")),
        secrets=("HF_TOKEN",),
        hosts=("gpu[1-8]", "ubuntu@10.0.0.7:2222"),
        region="eu-central-1",
        spot=True,
        max_price=12.5,
        idle=1800.0,
        max_lifetime=28800.0,
        yes=True,
        dry_run=True,
    )


def test_ranks_of_this_machine_are_one_node(golden: Golden) -> None:
    assert parse_pool("--ranks 2") == parse_pool("--nodes 1 --procs-per-node 2")
    assert parse_pool("--ranks 2 --gpu all").procs_per_node == 2
    assert parse_pool("--ranks 2").stated_fields() == {"nodes", "procs_per_node"}
    assert parse_pool("", body="ranks = 3").procs_per_node == 3
    golden(mistakes(parse_pool, "--provider ssh", body="ranks = 3")[0])


def test_a_run_may_describe_its_pool() -> None:
    request = parse_broadcast("--nodes 4 --gpu A100 -o results")
    assert request.pool.stated_fields() == {"nodes", "gpu"}
    assert request.pool.name is None
    assert request.output == "results"
    assert parse_broadcast("--pool train").pool.stated_fields() == frozenset(), (
        "a name alone describes nothing"
    )
    assert parse_broadcast("--procs-per-node auto").pool.stated_fields() == {"procs_per_node"}
    assert parse_broadcast("--dry-run").pool.dry_run


WAYS: list[tuple[str, dict[str, object], str]] = [
    ("an option", {"output": "x"}, "-o x|-ox|-o=x|--output x|--output=x|--output='x'|-o \"x\"|-o x;"),
    ("names", {"gather": ("loss", "acc")}, "-g loss,acc|-g loss acc|-g loss, acc|-g 'loss acc'|-g loss -g acc|-gloss,acc|-g loss,acc,loss"),
    ("no names", {"no_push": True}, "--no-push|--no-push -o x|--no-push -a"),
    ("or some", {"no_push": ("a", "b")}, "--no-push a b|--no-push=a,b"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "lines"), [way[1:] for way in WAYS], ids=[way[0] for way in WAYS]
)
def test_ways_to_write(fields: dict[str, object], lines: str) -> None:
    for line in lines.split("|"):
        request = parse_broadcast(line)
        assert {name: getattr(request, name) for name in fields} == fields, line


def test_plugins_in_one_list_or_several() -> None:
    expected = (PluginSpec("torch", {"backend": "gloo"}), PluginSpec("jax"))
    for (
        line
    ) in "torch:backend=gloo,jax|torch:backend=gloo --plugin jax|'torch:backend=gloo, jax'".split(
        "|"
    ):
        assert parse_broadcast(f"--plugin {line}").pool.plugins == expected
    assert parse_broadcast("--plugins torch, jax").pool.plugins == (
        PluginSpec("torch"),
        PluginSpec("jax"),
    )


def test_one_host_may_be_two_nodes() -> None:
    assert parse_pool("--hosts a,a --hosts b").hosts == ("a", "a", "b")
    assert parse_pool("--hosts @hosts.txt,gpu[1,3]").hosts == ("@hosts.txt", "gpu[1,3]")


def test_values_that_look_like_something_else() -> None:
    assert parse_broadcast("--env A=--flag").pool.env == (("A", "--flag"),)
    assert parse_broadcast("--env 'A=# b; c'").pool.env == (("A", "# b; c"),)
    assert parse_broadcast("--env A=").pool.env == (("A", ""),)
    assert parse_broadcast("-t -1").targets == Selection("-1")
    assert parse_broadcast("-t ::2 --only -2:").only == Selection("-2:")
    assert parse_broadcast("-o größe").output == "größe"


def test_nothing_is_evaluated(golden: Golden) -> None:
    golden(mistake("--nodes 1+1"))
    golden(mistake("--nodes {n}"))
    assert parse_broadcast("--env 'A=$HOME $(id) `id` {1+1}'").pool.env == (
        ("A", "$HOME $(id) `id` {1+1}"),
    )


# ------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--nodes 0", "--nodes: must be at least 1, not 0"),
        ("--nodes two", "--nodes: 'two' is not a whole number"),
        ("--nodes ٣", "is not a whole number"),
        ("--nodes 99999999999999999999", "is not a whole number"),
        ("--nodes", "--nodes needs N"),
        ("--num-nodes 0", "--num-nodes: must be at least 1"),
        ("--procs-per-node 0", "must be at least 1"),
        ("--gpu A100:0", "--gpu: '0' is not a number of accelerators per node"),
        ("--gpu a1oo", "did you mean 'A100'?"),
        ("--gpus quantum", "no accelerator is called 'quantum'"),
        ("--cpus many", "--cpus: 'many' is not an amount"),
        ("--memory 32TB", "--memory: '32TB' is not an amount"),
        ("--env NOEQUALS", "--secret NOEQUALS"),
        ("--env =x", "'' is not a name for an environment variable"),
        ("--env 1A=x", "'1A' is not a name"),
        ("--env A=1 --env A=2", "--env: A has several values"),
        ("--env A=1 --secret A", "A is both an --env and a --secret"),
        ("--secret A-B", "'A-B' is not a name"),
        ("--timeout 0", "--timeout: a duration must be more than 0"),
        ("--idle soon", "--idle: 'soon' is not a duration"),
        ("--max-lifetime -1h", "is not a duration"),
        ("--max-price -3", "--max-price: '-3' is not a price"),
        ("--max-price inf", "is not a price"),
        ("--only 1.5", "--only: '1.5' names no ranks"),
        ("-o 1x", "-o: '1x' is not a name for a variable"),
        ("-o class", "-o: 'class' is not a name"),
        ("-o a,b", "is not a name"),
        ("-g a,1x", "-g: '1x' is not a name"),
        ("-g ,", "-g: no name is given"),
        ("--push print()", "--push: 'print()' is not a name"),
        ("--pool 'a b'", "--pool: 'a b' is not a name for a pool"),
        ("--pool ../x", "is not a name for a pool"),
        ("--pool 2", "--pool: '2' is a number, not a name for a pool: --ranks 2 makes a pool"),
        ("--pool ranks=2", "write an option as --ranks 2"),
        ("--region 'eu; rm'", "is not a region"),
        (
            "--image-id=ami-1",
            "--image-id: a setting for all pools: %config SkyMagic.aws = {'image_id'",
        ),
        ("--hosts a;b", "--hosts: 'a;b' is not a host"),
        ("--hosts '-oProxyCommand=id'", "is not a host"),
        ("--hosts a,-F", "--hosts: '-F' is not a host"),
        ("--pip torch=2.3", "--pip: 'torch=2.3' is not a requirement"),
        ("--pip torch==2.3,torch==2.4", "--pip: torch cannot be all of torch==2.3, torch==2.4"),
        ("--pip='-r x.txt'", "is not a requirement"),
        ("--plugin toch", "--plugin: no plugin is called 'toch'; did you mean 'torch'?"),
        ("--plugin zzz", "available: torch, jax"),
        ("--plugin backend=gloo", "belongs to no plugin"),
        ("--plugin torch --plugin torch:backend=gloo", "--plugin: torch is given twice"),
        ("--provider asw", "--provider: no provider is called 'asw'; did you mean 'aws'?"),
        ("--provider slrm", "--provider: no provider is called 'slrm'; did you mean 'slurm'?"),
        ("--provider slurm --partition=''", "--partition"),
        ("--ranks 0", "--ranks: must be at least 1"),
        (
            "--ranks 2 --nodes 2",
            "--ranks is one node of so many ranks, and --nodes 2 makes several: keep one of them",
        ),
        (
            "--ranks 2 --provider ssh --hosts a,b",
            "of --provider ssh is counted in nodes: write --nodes, and --procs-per-node",
        ),
        (
            "--ranks 2 --hosts a,b",
            "a pool of hosts is counted in nodes: write --nodes, and --procs-per-node",
        ),
        (
            "--ranks 4 --procs-per-node 2",
            "--ranks and --procs-per-node are the same option (4 and 2)",
        ),
        ("--node 2", "--node: no such option; did you mean '--nodes'?"),
        ("--num_nodes 2", "did you mean '--num-nodes'?"),
        ("-output x", "-output: no such option; did you mean '--output'?"),
        ("-ay", "-ay: no such option"),
        ("--", "--: no such option"),
        ("--wat=5", "--wat: no such option"),
        ("--fresh=1", "--fresh takes no value, not '1'"),
        ("-o", "-o needs NAME"),
        ("-o -g a", "-o needs NAME; '-g' is read as an option: quote it to use it as the value"),
        ("--pool --nodes 2", "--pool needs NAME; '--nodes' is read as an option"),
        ("--pool '--nodes'", "--pool: '--nodes' is not a name for a pool"),
        ("--nodes 2 --nodes 3", "--nodes is given twice (2 and 3)"),
        ("--nodes 2 --num-nodes 2", "--nodes and --num-nodes are the same option (2 and 2)"),
        ("--pool a b", "b and --pool a are two pools"),
        ("a b", "expected one pool name, got 2: 'a', 'b'"),
        ("--head", "--head keeps one value of -o or -g"),
        ("--push a --no-push a", "a: named by --push and by --no-push"),
        ("--no-push --fresh", "--fresh"),
        ("-a --dry-run", "--noblock has no meaning with --dry-run"),
        ("-o a -g a,b", "-o and -g would both set it"),
    ],
)
def test_one_clear_line(line: str, told: str) -> None:
    found = mistakes(parse_broadcast, line)
    assert told in found[0]
    assert len(found) == 1
    assert "\n" not in found[0]


def test_all_mistakes_at_once() -> None:
    line = "--nodes two --gpu a1oo:0 -o 1x --wat 5 --plugin toch,backend --timeout 0 --env X --only z --provider asw --head"
    found = mistakes(parse_broadcast, line)
    for part in "'two'|'a1oo'|'0' is not a number|'1x'|--wat|'toch'|'backend'|--timeout|--env|'z'|'asw'".split(
        "|"
    ):
        assert sum(part in one for one in found) == 1, part
    assert str(RequestError(found)).count("\n") == 0, "one line"


def test_a_mistake_does_not_bring_another() -> None:
    assert len(mistakes(parse_broadcast, "--wat 5")) == 1, "5 is the unknown option's value"
    assert len(mistakes(parse_broadcast, "--head -o 1x")) == 1, "-o is there, though misspelt"


@pytest.mark.parametrize(
    "line",
    ["--head -o x", "--head -g x", "-o x --only 0", "-a --timeout 1m -o x", "--no-push --push a"],
)
def test_options_that_go_together(line: str) -> None:
    assert parse_broadcast(line)


def test_completion_gets_names_from_outside(golden: Golden) -> None:
    assert parse_pool("--plugin mine", plugins=["mine"]).plugins == (PluginSpec("mine"),)
    assert parse_pool("--provider mine", providers=["mine"]).provider == "mine"
    assert parse_pool("--provider auto", providers=["auto", "mine"]).provider == "auto"
    assert (
        "available: auto, mine"
        in mistakes(parse_pool, "--provider zzz", providers=["auto", "mine"])[0]
    )
    golden(mistakes(parse_pool, "--plugin torch", plugins=[])[0])


def test_packages_are_searched_only_for_unknown_names() -> None:
    def looked() -> list[str]:
        raise AssertionError("it takes longer than many a cell")

    plugins, providers = LazyNames(["torch"], looked), LazyNames(["auto", "local"], looked)
    assert parse_broadcast("--plugin torch --provider local", plugins=plugins, providers=providers)
    assert parse_broadcast("-o x", plugins=plugins, providers=providers)
    with pytest.raises(AssertionError, match="longer"):
        parse_broadcast("--plugin mine", plugins=plugins, providers=providers)


# ------------------------------------------------------------------------------------------------------ defaults

CONFIGURED = Defaults(
    provider="local",
    plugins=plugin_specs("torch:backend=gloo"),
    only=Selection("all"),
    timeout=60.0,
    idle=1800.0,
    max_lifetime=7200.0,
)


def test_defaults_fill_unset_options() -> None:
    request = parse_broadcast("", CONFIGURED)
    assert (request.only, request.timeout) == (Selection("all"), 60.0)
    pool = request.pool
    assert (pool.provider, pool.idle, pool.max_lifetime) == ("local", 1800.0, 7200.0)
    assert pool.plugins == plugin_specs("torch:backend=gloo")
    assert pool.stated_fields() == frozenset(), "configured is not stated"


def test_a_line_overrides_defaults() -> None:
    request = parse_broadcast(
        "--only head --timeout none --plugin jax --idle none --provider auto", CONFIGURED
    )
    assert (request.only, request.timeout, request.pool.idle) == (Selection("head"), None, None)
    assert request.pool.plugins == (PluginSpec("jax"),)
    assert request.pool.stated_fields() == {"plugins", "idle", "provider"}
    assert parse_broadcast("--timeout 5", CONFIGURED).timeout == 5.0
    assert parse_broadcast("", CONFIGURED).timeout == 60.0


def test_a_misspelt_default_names_its_place() -> None:
    assert mistakes(parse_pool, "", Defaults(plugins=plugin_specs("toch")))[0].startswith(
        "%config SkyMagic.plugins: "
    )
    assert mistakes(parse_pool, "", Defaults(provider="asw"))[0].startswith(
        "%config SkyMagic.provider: "
    )


def test_configuration_is_checked_when_it_is_set() -> None:
    settings = SkyMagic()
    assert settings.defaults() == Defaults()
    settings.update_config(
        Config({"SkyMagic": {"only": "all", "idle": "30m", "plugins": ["torch:backend=gloo,jax"]}})
    )
    settings.timeout = 90
    assert settings.defaults() == Defaults(
        only=Selection("all"),
        idle=1800.0,
        timeout=90.0,
        plugins=plugin_specs("torch:backend=gloo,jax"),
    )
    settings.only = [0, 2]
    assert settings.defaults().only == Selection("0,2")
    settings.update_config(Config({"SkyMagic": {"plugins": "torch"}}))
    assert settings.defaults().plugins == (PluginSpec("torch"),)
    settings.timeout = None
    assert settings.defaults().timeout is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("only", "some"),
        ("only", None),
        ("idle", "soon"),
        ("timeout", 0),
        ("timeout", True),
        ("max_lifetime", "-1h"),
        ("plugins", ["=x"]),
        ("plugins", ["torch:"]),
        ("plugins", 3),
        ("grace", -1.0),
        ("screen_limit", 0),
        ("log_limit", 1000),
        ("stall_after", "long"),
    ],
)
def test_bad_configuration_is_refused(name: str, value: object) -> None:
    settings = SkyMagic()
    with pytest.raises(TraitError):
        setattr(settings, name, value)
    assert settings.defaults() == Defaults(), "and leaves what was there"


# ---------------------------------------------------------------------------------------------------------- pool


def test_a_duration_in_two_words() -> None:
    assert parse_broadcast("--timeout 5 min").timeout == 300.0
    assert parse_broadcast("--timeout 5 min train").pool.name == "train"
    assert parse_broadcast("train --timeout=2 hours -o r").timeout == 7200.0
    assert parse_broadcast("--timeout 5 'min'").pool.name == "min"
    assert parse_pool("--idle 90 train").name == "train"


def test_a_pool_has_one_name(golden: Golden) -> None:
    assert parse_pool("train").name == "train"
    assert parse_pool("--nodes 2 train").name == "train"
    assert parse_pool("").name is None
    golden(mistakes(parse_pool, "a b"))
    golden(mistakes(parse_pool, "größe")[0])


@pytest.mark.parametrize("magic", [name for name, face in MAGICS.items() if face.takes_pool])
def test_a_pools_name_stands_alone_or_after_pool(magic: str) -> None:
    alone, named = PARSERS[magic]("train"), PARSERS[magic]("--pool train")
    assert alone == named
    assert "train" in repr(alone)


@pytest.mark.parametrize(
    "magic", ["logs", "stacks", "vars", "push", "pull", "restart", "broadcast"]
)
def test_ranks_have_one_selector_and_its_older_spelling(magic: str) -> None:
    words = {"push": "x", "pull": "x"}.get(magic, "")
    chosen = PARSERS[f"sky_{magic}"](f"-t 1 {words}")
    assert (
        chosen
        == PARSERS[f"sky_{magic}"](f"--targets 1 {words}")
        == PARSERS[f"sky_{magic}"](f"--rank 1 {words}")
    )
    if magic == "broadcast":
        assert parse_broadcast("--ranks 2").pool.procs_per_node == 2, "there it is a size"
    else:
        assert chosen == PARSERS[f"sky_{magic}"](f"--ranks 1 {words}")


@pytest.mark.parametrize(
    ("magic", "line", "same"),
    [
        ("sky_pool", "-n 2", "--num-nodes 2"),
        ("sky_pool", "--ranks 2 --detach", "--ranks 2 --detached"),
        ("sky_sh", "--detach", "--detached"),
        ("sky_broadcast", "-o x", "--out x"),
        ("sky_get", "a b --nodes 1", "a b --node 1"),
        ("sky_forward", "6006 -n 1", "6006 --node 1"),
        ("sky_gpus", "A100 -n 2", "A100 --num-nodes 2"),
    ],
)
def test_other_spellings_are_accepted_and_not_shown(magic: str, line: str, same: str) -> None:
    assert PARSERS[magic](line) == PARSERS[magic](same)
    (other,) = set(re.findall(r"--[\w-]+", same)) - set(re.findall(r"--[\w-]+", line))
    assert not re.search(rf"{other}[\s,]", help_text(magic))


def test_the_help_of_broadcast_has_ten_options() -> None:
    shown = help_text("sky_broadcast").partition("Options:\n")[2].partition("\n\n")[0]
    assert len(shown.splitlines()) == 10
    assert "--provider" not in shown, "documented at %sky_pool"


TOML = """
name = "train"                 # a comment
nodes = 2
gpu = "A100:8"
procs-per-node = 4
memory = 32
spot = true
yes = false
idle = "30m"
max_price = 12.5
pip = ["numpy>=2,<3", "pandas"]
secret = "HF_TOKEN"

[env]
OMP_NUM_THREADS = 2
PATHS = "a=b,c"
FLAG = true

[plugins.torch]
backend = "gloo"
version = ">=2.3,<2.5"
note = "a,b:c=d"

[plugins.jax]
"""


def test_toml() -> None:
    assert parse_pool_toml(TOML) == PoolRequest(
        name="train",
        nodes=2,
        gpu=Accelerator("A100", 8),
        procs_per_node=4,
        memory=AtLeast(32),
        spot=True,
        idle=1800.0,
        max_price=12.5,
        pip=("numpy>=2,<3", "pandas"),
        secrets=("HF_TOKEN",),
        env=(("OMP_NUM_THREADS", "2"), ("PATHS", "a=b,c"), ("FLAG", "true")),
        plugins=(
            PluginSpec("torch", {"backend": "gloo", "version": ">=2.3,<2.5", "note": "a,b:c=d"}),
            PluginSpec("jax"),
        ),
    )
    assert parse_pool_toml(TOML).stated_fields() >= {"nodes", "gpu", "plugins", "env"}


def test_toml_lists_read_as_the_line_does() -> None:
    line = parse_pool("--plugin torch:backend=gloo --plugin jax --env A=1 --hosts a,b")
    body = 'plugins = ["torch:backend=gloo", "jax"]\nenv = ["A=1"]\nhosts = ["a", "b"]'
    assert parse_pool_toml(body) == line
    assert parse_pool_toml('plugin = "torch:backend=gloo,jax"\nenv = "A=1"\nhosts = "a,b"') == line


def test_toml_adds_to_the_line() -> None:
    request = parse_pool("train --env A=1", CONFIGURED, body="nodes = 2\n[env]\nB = '2'")
    assert (request.name, request.nodes, request.idle) == ("train", 2, 1800.0)
    assert request.env == (("A", "1"), ("B", "2"))
    assert parse_pool("train", body='name = "train"').name == "train"
    assert (
        parse_pool("train", body="")
        == parse_pool("train")
        == parse_pool("train", body="\n# nothing\n")
    )


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("nodes = = 2", "the cell is not TOML"),
        ("nodes = 2\nnodes = 3", "the cell is not TOML"),
        ("just words", "the cell is not TOML"),
        ("x = " + "[" * 5000, "the cell is not TOML"),
        ("nodes = " + "9" * 5000, "the cell is not TOML"),
        ("nodes = 0x" + "f" * 5000, "nodes takes a string or a number"),
        ("nodes = 'two'", "nodes: 'two' is not a whole number"),
        ("nodes = 0", "nodes: must be at least 1, not 0"),
        ("nodes = true", "nodes takes a string or a number"),
        ("idle = nan", "idle: 'nan' is not a duration"),
        ("idle = 2020-01-01", "idle takes a string or a number"),
        ("spot = 1", "spot takes true or false"),
        ("hosts = [1]", "hosts takes a string or a list of strings"),
        ("name = 3", "name takes a string"),
        ("node = 2", "node: no such key; did you mean 'nodes'?"),
        ("nodes = 2\nnum-nodes = 2", "nodes and num-nodes are the same option (2 and 2)"),
        ("plugins = ['toch']", "plugins: no plugin is called 'toch'; did you mean 'torch'?"),
        ("[plugins]\ntorch = 'gloo'", "plugins.torch takes a table of strings: [plugins.torch]"),
        ("[plugins.torch]\nbackend = ['gloo']", "plugins.torch takes a table of strings"),
        ("[env]\nA = [1]", "env.A takes a string"),
        ('[env]\n"A=B" = "x"', "'A=B' is not a name for an environment variable"),
        ("[nodes]\nx = 1", "nodes takes a string or a number"),
    ],
)
def test_toml_mistakes_name_the_key(body: str, told: str) -> None:
    found = mistakes(parse_pool_toml, body)
    assert told in found[0]
    assert len(found) == 1


def test_mistakes_of_line_and_body_are_listed_together() -> None:
    found = mistakes(
        parse_pool, "a --nodes 2 --idle soon", body='name = "b"\nnodes = 3\nwat = 1\nenv = "X"'
    )
    told = "\n".join(found)
    for part in "got 2: 'a', 'b'|--nodes and nodes are the same option (2 and 3)|--idle: 'soon'|wat: no such key|env: 'X'".split(
        "|"
    ):
        assert part in told, part


# ---------------------------------------------------------------------------------------------- the other magics


def test_attach(golden: Golden) -> None:
    assert parse_attach("") == AttachRequest()
    assert parse_attach("lab --take-over") == AttachRequest("lab", take_over=True)
    golden(mistakes(parse_attach, "--take-over"))


def test_cell_during_another_cell_waits_or_fails(golden: Golden) -> None:
    assert parse_broadcast("").busy == "wait"
    assert parse_broadcast("", Defaults(busy="refuse")).busy == "refuse"
    assert parse_broadcast("--busy refuse").busy == "refuse"
    assert parse_sh("--busy wait", Defaults(busy="refuse")).busy == "wait"
    golden(mistakes(parse_broadcast, "--busy skip")[0])


def test_shell(golden: Golden) -> None:
    assert parse_sh("") == ShellRequest()
    assert parse_sh("--workdir 'my folder' --detach --pool p") == ShellRequest(
        "my folder", True, "p"
    )
    assert (parse_sh("", CONFIGURED).only, parse_sh("", CONFIGURED).timeout) == (
        Selection("all"),
        60.0,
    )
    request = parse_sh("--only head --timeout none", CONFIGURED)
    assert (request.only, request.timeout) == (Selection("head"), None)
    assert parse_sh("--detach; # a comment").only == Selection("head")
    golden(mistakes(parse_sh, "--workdir ''")[0])
    golden(mistakes(parse_sh, "torchrun main.py")[0])


def test_everything_of_a_shell() -> None:
    line = (
        "--pool p --workdir src --env A=1 --env 'B=x y' --secret HF_TOKEN,KEY --timeout 10m -n 0:2 --only all "
        "-o ends -a   # all of it"
    )
    assert parse_sh(line) == ShellRequest(
        workdir="src",
        pool="p",
        env=(("A", "1"), ("B", "x y")),
        secrets=("HF_TOKEN", "KEY"),
        timeout=600.0,
        nodes=Selection("0:2"),
        only=Selection("all"),
        output="ends",
        noblock=True,
    )
    assert parse_sh("--targets 1 --output=ends --noblock") == ShellRequest(
        rank=Selection("1"), output="ends", noblock=True
    )
    assert parse_sh("--rank head") == parse_sh("-t head") == ShellRequest(rank=Selection("head"))


def test_all_mistakes_of_a_shell_at_once() -> None:
    found = mistakes(
        parse_sh,
        "train.sh --env X --secret 1 --timeout soon -t z --only 1.5 -o class --wat -g loss --ranks 2",
    )
    assert len(found) == 10
    for line, told in (
        ("-a=1", "-a takes no value"),
        ("--env A=1 --secret A", "A is both an --env and a --secret"),
        ("-t 1 --nodes 0", "-t chooses a rank and --nodes nodes"),
        ("-t 1 --only all", "--only chooses among nodes"),
    ):
        assert mistakes(parse_sh, line)[0].startswith(told)


def test_logs() -> None:
    assert parse_logs("") == LogsRequest()
    assert parse_logs("--rank 1 -n 20 -f --pool p") == LogsRequest(Selection("1"), 20, True, "p")
    assert parse_logs("-n20").lines == 20
    assert parse_logs("--run 3 --cell 5 --grep 'loss|nan'") == LogsRequest(
        run=3, cell=5, grep="loss|nan"
    )
    assert len(mistakes(parse_logs, "-n many --rank x --run 0 --cell five")) == 4


def test_push_and_pull(golden: Golden) -> None:
    assert parse_push("model, data") == NamesRequest(("model", "data"))
    assert parse_push("a b -t 0:2") == NamesRequest(("a", "b"), Selection("0:2"))
    assert parse_pull("a -o b --head --pool p") == NamesRequest(("a",), None, "b", True, "p")
    golden(mistakes(parse_push, "")[0])
    golden(mistakes(parse_pull, "1x")[0])
    assert "2 are named" in mistakes(parse_pull, "a b -o c")[0]
    golden(mistakes(parse_push, "a -o b")[0])


def test_files(golden: Golden) -> None:
    assert parse_put("'my data/' data/ --pool p") == FilesRequest("my data/", "data/", pool="p")
    assert parse_get("out/ 'aus gabe' # comment") == FilesRequest("out/", "aus gabe")
    assert parse_get("out --node=0,2 .") == FilesRequest("out", ".", Selection("0,2"))
    assert parse_put("'-x' y").source == "-x"
    for line in ("", "a", "a b c"):
        golden(mistakes(parse_put, line)[0])
    golden(mistakes(parse_get, "a ''")[0])


def test_forward(golden: Golden) -> None:
    assert parse_forward("6006") == ForwardRequest((6006,))
    assert parse_forward("6006 8265 6006 --node 1 --pool p") == ForwardRequest(
        (6006, 8265), Selection("1"), "p"
    )
    golden(mistakes(parse_forward, "")[0])
    found = mistakes(parse_forward, "0 65536 http --hosts a")
    golden(
        [
            word
            for word in ("0", "65536", "http")
            if not any(f"{word} is not a port" in one for one in found)
        ]
    )
    golden([one for one in found if "--hosts" in one])


def test_pip() -> None:
    assert parse_pip("list") == PipRequest()
    assert parse_pip("install pandas 'pillow>=12' --pool p") == PipRequest(
        ("pandas", "pillow>=12"), "p"
    )
    assert parse_pip("install pandas --all").all
    for (
        wrong
    ) in "|pandas|install|list pandas|install x --index-url=x|install ;|list --all --pool p".split(
        "|"
    ):
        assert len(mistakes(parse_pip, wrong)) == 1, wrong


def test_lifecycle(golden: Golden) -> None:
    assert parse_clone("2 --from 0 model, optimizer") == CloneRequest(
        Selection("2"), 0, ("model", "optimizer")
    )
    assert parse_clone("1: --from=0 a b --pool p") == CloneRequest(
        Selection("1:"), 0, ("a", "b"), "p"
    )
    golden(mistakes(parse_clone, "model"))
    golden(mistakes(parse_clone, "1 --from x 2y"))
    for parse in (parse_restart, parse_stacks, parse_vars):
        assert parse("") == RanksRequest()
        assert parse("--rank 0,3 --pool lab") == RanksRequest(Selection("0,3"), "lab")
    assert parse_down("") == DownRequest()
    assert parse_down("train") == DownRequest("train")
    assert parse_down("--all;") == DownRequest(None, True)
    golden(mistakes(parse_down, "train --all"))
    assert parse_down("train --provider aws") == DownRequest("train", provider="aws")
    assert len(mistakes(parse_down, "--all --hosts gpu1 --provider aws")) == 2
    golden(mistakes(parse_down, "--al"))
    golden(mistakes(parse_status, "a b")[0])


def test_looking(golden: Golden) -> None:
    assert (parse_status("# all"), parse_status("train")) == (
        StatusRequest(),
        StatusRequest("train"),
    )
    assert parse_status("lab --hosts gpu1,gpu2") == StatusRequest("lab", ("gpu1", "gpu2"))
    assert parse_status("--hosts gpu[1-2] --disk") == StatusRequest(None, ("gpu[1-2]",), True)
    assert parse_status("lab --provider aws") == StatusRequest("lab", provider="aws")
    assert len(mistakes(parse_status, "-o s --hosts gpu1 --provider aws")) == 3
    assert "'gcp'" in mistakes(parse_status, "--provider gcp")[0]
    assert parse_down("lab --hosts gpu1,gpu2") == DownRequest("lab", hosts=("gpu1", "gpu2"))
    assert parse_check("train") == "train"
    assert parse_down("--clean --hosts gpu1 --all --dry-run") == DownRequest(
        None, True, ("gpu1",), clean=True, dry_run=True
    )
    golden(mistakes(parse_down, "--clean --all"))
    golden(mistakes(parse_down, "lab --clean --hosts gpu1 --provider aws"))
    golden(mistakes(parse_down, "lab --dry-run"))
    assert parse_status("lab --cost") == StatusRequest("lab", cost=True)
    for place in ("--hosts gpu1", "--provider aws", "--hosts gpu1 --disk"):
        golden(mistakes(parse_status, f"--cost {place}")[0])
    golden(mistakes(parse_status, "--cost -o kept"))
    assert len(mistakes(parse_status, "lab --disk")) == 2
    assert (parse_gpus(""), parse_gpus("a100-80gb")) == (
        GpusRequest(),
        GpusRequest(Accelerator("A100-80GB")),
    )
    asked = GpusRequest(Accelerator("A100", 8), nodes=4, region="us-east-1,us-west-2", spot=True)
    assert parse_gpus("a100:8 --nodes 4 --region us-east-1,us-west-2 --spot") == asked
    golden(mistakes(parse_gpus, "--spot"))
    golden(mistakes(parse_gpus, "A100 --region us_east")[0])
    golden(mistakes(parse_gpus, "trn1")[0])
    golden(mistakes(parse_gpus, "a1oo")[0])


def test_auto(golden: Golden) -> None:
    assert parse_auto("on") is True
    assert parse_auto("off;") is False
    golden(mistakes(parse_auto, ""))
    golden(mistakes(parse_auto, "of")[0])
    assert mistakes(parse_auto, "on off")


# ------------------------------------------------------------------------------------------- help and completion


@pytest.mark.parametrize("magic", MAGICS)
def test_help_shows_every_option_and_a_line_that_works(magic: str) -> None:
    text = help_text(magic)
    assert text.startswith(MAGICS[magic].summary)
    for option in MAGICS[magic].options:
        assert (
            all(name in text for name in option.names) is option.common or option.names[-1] in text
        )
        assert (option.help in text) is option.common
    for example_ in MAGICS[magic].examples:
        head, _, body = example_.partition("\n")
        mark, _, line = head.lstrip("%").partition(" ")
        assert mark == magic
        if magic == "sky_pool":
            assert parse_pool(line, body=body or None)
        else:
            PARSERS[magic](line)


def test_every_option_has_help_and_a_name_of_its_own() -> None:
    for face in MAGICS.values():
        names = [name for option in face.accepted for name in option.spellings]
        assert len(names) == len(set(names))
        assert all(
            option.help and (option.metavar or option.read is None) for option in face.options
        )


NOW = CompletionNames(
    pools=("train", "test"),
    variables=("model", "mother"),
    rank_variables=("weights", "words"),
    plugins=("torch", "jax"),
    providers=("auto", "ssh"),
)


@pytest.mark.parametrize(
    ("magic", "text", "found"),
    [
        ("sky_broadcast", "--no", ["--noblock", "--no-push", "--nodes"]),
        ("sky_broadcast", "-o x --noblock --no", ["--no-push", "--nodes"]),
        ("sky_broadcast", "--plugin torch --plu", ["--plugin"]),
        ("sky_broadcast", "--gpu a1", ["A10", "A100", "A100-80GB", "A10G", "A16"]),
        ("sky_broadcast", "--gpu=A100-", ["A100-80GB"]),
        ("sky_broadcast", "--gpu A100 ", ["test", "train"]),
        ("sky_broadcast", "--only ", ["all", "head"]),
        ("sky_broadcast", "--pool ", ["test", "train"]),
        ("sky_broadcast", "--push model mo", ["model", "mother"]),
        ("sky_broadcast", "--no-push model,mot", ["mother"]),
        ("sky_broadcast", "--timeout ", []),
        ("sky_broadcast", "", ["test", "train"]),
        ("sky_pool", "", ["test", "train"]),
        ("sky_pool", "--plugin torch,", ["jax", "torch"]),
        ("sky_pool", "--plugins=torch,j", ["jax"]),
        ("sky_pool", "--nodes 2 tr", ["train"]),
        (
            "sky_down",
            "--",
            ["--all", "--hosts", "--provider", "--login", "--clean", "--dry-run", "--pool"],
        ),
        ("sky_gpus", "h", ["H100", "H20", "H200", "H800"]),
        ("sky_clone", "2 --f", ["--from"]),
        ("sky_clone", "2 --from 0 w", ["weights", "words"]),
        ("sky_pull", "we", ["weights"]),
        ("sky_push", "model,mo", ["model", "mother"]),
        ("sky_sh", "--env A=1 --e", ["--env"]),
        ("sky_broadcast", "# --no", []),
        ("sky_broadcast", "-o x # --no", []),
        ("sky_broadcast", "-o 'x --no", []),
    ],
)
def test_completion(magic: str, text: str, found: list[str]) -> None:
    assert complete(magic, text, NOW) == found


# ---------------------------------------------------------------------------------------------------- any input

_PIECES = st.sampled_from(
    [name for face in MAGICS.values() for option in face.accepted for name in option.spellings]
    + list("'\" =,:;#\\-\0\n")
    + "-- 1 0:4 A100:8 torch a none 8+ \u00fc A=1".split()
)
LINES = (
    st.text(max_size=40)
    | st.lists(_PIECES, max_size=10).map(" ".join)
    | st.lists(_PIECES, max_size=10).map("".join)
)


@settings(max_examples=1000, deadline=None)
@given(magic=st.sampled_from(list(MAGICS)), line=LINES)
@example(magic="sky_broadcast", line="--env A=--x '")
@example(magic="sky_broadcast", line="-")
def test_any_line_parses_or_is_refused_and_completes(magic: str, line: str) -> None:
    try:
        hash(PARSERS[magic](line))
    except RequestError as wrong:
        assert wrong.mistakes  # noqa: PT017 - not raising is fine as well
        assert all(isinstance(one, str) and one for one in wrong.mistakes)  # noqa: PT017
    assert all(isinstance(word, str) for word in complete(magic, line, NOW))


@settings(deadline=None)
@given(
    body=st.text(max_size=60)
    | st.lists(
        st.sampled_from(
            [
                "nodes",
                "=",
                "2",
                "'x'",
                "[",
                "]",
                "env",
                "plugins",
                ".",
                "\n",
                "torch",
                "true",
                "{",
                "}",
            ]
        ),
        max_size=12,
    ).map(" ".join)
)
def test_any_body_is_a_request_or_refused_in_words(body: str) -> None:
    try:
        parse_pool_toml(body)
    except RequestError as wrong:
        assert all(wrong.mistakes)  # noqa: PT017 - not raising is fine as well


@settings(deadline=None)
@given(
    nodes=st.none() | st.integers(1, 999),
    gpu=st.none()
    | st.builds(Accelerator, st.sampled_from(["A100", "L4", "A100-80GB"]), st.integers(1, 16)),
    idle=st.none() | st.integers(1, 10**6),
    env=st.dictionaries(
        st.from_regex(r"[A-Z_][A-Z0-9_]{0,5}", fullmatch=True), st.text(max_size=10), max_size=3
    ),
    only=st.sampled_from(["head", "all", "0,2", "1:", "::2"]),
)
def test_written_requests_parse_back(
    nodes: int | None, gpu: Accelerator | None, idle: int | None, env: dict[str, str], only: str
) -> None:
    words = [f"--only {only}"]
    words += [f"--nodes {nodes}"] if nodes else []
    words += [f"--gpu={gpu}"] if gpu else []
    words += [f"--idle {idle}s"] if idle else []
    for name, value in env.items():
        words.append('--env "' + f"{name}={value}".replace("\\", "\\\\").replace('"', '\\"') + '"')
    request = parse_broadcast(" ".join(words) + "  # and a comment")
    assert request == RunRequest(
        pool=PoolRequest(nodes=nodes, gpu=gpu, idle=idle, env=tuple(env.items())),
        only=Selection(only),
    )
