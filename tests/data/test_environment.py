"""Changes of the notebook's environment reach the ranks, except secrets."""

from __future__ import annotations

import pytest

from skymagic.data.capture.assignments import is_secret_variable
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", "import os", scope="function")

PLAIN = (
    "TOKENIZERS_PARALLELISM MAX_TOKENS MAX_NEW_TOKENS KEYBOARD AUTHOR AUTHORS MONKEY TURKEY_SIZE KEYWORDS KEYPOINTS"
    " NUM_KEYS PAD_TOKEN SORT_KEY AUTHORITY SECRETARY COMPASS HF_HUB_DISABLE_IMPLICIT_TOKEN Tokenizers tokenizerName"
    " GIT_AUTHOR_NAME XKB_KEYBOARD TOKENIZER_PATH BYPASS LR EPOCHS PATTERN"
).split()
SECRET = (
    "HF_TOKEN WANDB_API_KEY OPENAI_API_KEY OPENAIKEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID PGPASSWORD DB_PASS"
    " MY_PASSWORD GITHUBTOKEN GITHUB_PAT hf_token githubToken apiKey GOOGLE_APPLICATION_CREDENTIALS MLFLOW_AUTH"
    " STORAGE_PRIMARY_KEY INPUT_TOKEN GROUP_KEY NEW_API_KEY OAUTH_CLIENT AUTHTOKEN KEY TOKEN API_TOKENS SSH_KEY2 BEARER"
).split()


@pytest.mark.parametrize("name", PLAIN)
def test_ordinary_name_is_no_secret(name: str) -> None:
    assert not is_secret_variable(name)


@pytest.mark.parametrize("name", SECRET)
def test_secret_is_recognised(name: str) -> None:
    assert is_secret_variable(name)


SEEN = (
    "[os.environ.get(n) for n in ('TOKENIZERS_PARALLELISM', 'MAX_TOKENS', 'KEYBOARD', 'MY_TOKEN')]"
)


def test_variables_follow_without_a_note(notebook: Notebook) -> None:
    notebook.run(
        "os.environ['TOKENIZERS_PARALLELISM'] = 'false'\nos.environ['MAX_TOKENS'] = '7'\nos.environ.update(KEYBOARD='de')"
    )
    cell = notebook.run(f"%%sky_broadcast -o got\nimport os\n{SEEN}")
    assert notebook.value("got") == [["false", "7", "de", None]] * 2
    assert "environ" not in cell.said
    assert "secret" not in cell.said
    notebook.run("os.environ['MY_TOKEN'] = 'x'")
    cell = notebook.run(f"%%sky_broadcast -o got\n{SEEN}")
    assert notebook.value("got")[0][3] is None
    assert "MY_TOKEN" in cell.said


@pytest.mark.parametrize(
    "delete", ["del os.environ['MY_FLAG']", "os.environ.pop('MY_FLAG')", "os.environ.clear()"]
)
def test_deleted_variable_is_deleted_on_the_ranks(notebook: Notebook, delete: str) -> None:
    if "clear" in delete:
        delete = "kept = dict(os.environ); kept.pop('MY_FLAG'); os.environ.clear(); os.environ.update(kept)"
    for value in ("1", "2"):
        notebook.run(f"os.environ['MY_FLAG'] = {value!r}")
        notebook.run("%%sky_broadcast -o got\nimport os\nos.environ.get('MY_FLAG')")
        assert notebook.value("got") == [value] * 2
        notebook.run(delete)
        notebook.run("%%sky_broadcast -o got\nos.environ.get('MY_FLAG')")
        assert notebook.value("got") == [None, None]
