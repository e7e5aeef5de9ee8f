"""A pool that is shared is as new for each who borrows it, and one that is not is never lent again."""

from __future__ import annotations

from tests.lab.pools import Pools

SHAPE = "--ranks 2"
CHANGES = "os.environ['LEFT'] = 'x'; sys.path.insert(0, 'left')"


def test_lent_pool_has_nothing_of_its_last_user(shared_pools: Pools) -> None:
    with shared_pools.lent(
        SHAPE, "mine = 1", "%config SkyMagic.grace = 9.0", "import os, sys"
    ) as notebook:
        first = notebook.pid
        notebook.run("%sky_pool other --ranks 1")
        notebook.run(f"%%sky_broadcast --pool main\nimport os, sys\nthere = mine\n{CHANGES}")
        notebook.run(CHANGES)
        notebook.run("open('left.txt', 'w').close(); os.mkdir('sub'); os.chdir('sub')")
        notebook.run("%sky_auto on")
    look = "'LEFT' in os.environ, 'left' in sys.path, sorted({'mine', 'there'} & set(globals()))"
    with shared_pools.lent(SHAPE, "import os, sys") as notebook:
        assert notebook.pid == first
        notebook.run(f"%%sky_broadcast -o looks\n{look}")
        assert notebook.value("looks") == [(False, False, [])] * 2
        assert notebook.value(look) == (False, False, [])
        assert notebook.value("[each for each in os.listdir() if each[0] != '.']") == []
        assert "grace=9.0" not in notebook.run("%config SkyMagic").said
        assert "other" not in notebook.run("%sky_status").said


def test_changed_pool_is_not_lent_again(shared_pools: Pools) -> None:
    with shared_pools.lent(SHAPE) as notebook:
        first = notebook.pid
        notebook.fail("%%sky_broadcast\nimport os\nif os.environ['RANK'] == '1':\n    os._exit(3)")
    with shared_pools.lent(SHAPE) as notebook:
        second = notebook.pid
        assert second != first
        shared_pools.spoil(notebook)
    assert shared_pools.emptied(SHAPE) is None
