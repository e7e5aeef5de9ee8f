"""Which changes of the notebook's environment are sent: all but secrets."""

from __future__ import annotations

import pytest

from skymagic.data.capture.assignments import is_secret_variable

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
