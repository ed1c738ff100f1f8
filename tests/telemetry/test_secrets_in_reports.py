"""Reports are shared: they must not contain credentials."""

import json

import pytest
from helpers.run_histories import disturbed_run, write_run
from test_report_page import facts_of

from hpctrain.cli.report import json_report
from hpctrain.cli.resume import resubmit_command
from hpctrain.jobspec.redaction import redact, redact_args
from hpctrain.telemetry.report.pages import render_run_page

SPEC = {
    "script": "/home/me/train.py",
    "args": [
        "--api-key",
        "s3kret1",
        "--token=s3kret2",
        "--max-tokens",
        "shown1",
        "--tokenizer",
        "shown2",
        "db://u:s3kret3@h/x",
    ],
    "workdir": "/home/me",
    "env": {"GH_PAT": "s3kret4", "DATABASE_URL": "postgres://u:s3kret5@h/db", "PATH_TO": "shown3"},
    "setup": ["export OPENAI_API_KEY=s3kret6", "module load shown4", "curl -u me:x https://me:s3kret7@h/"],
    "notify": {
        "targets": [
            'curl -H "Authorization: Bearer s3kret8" https://h/s3kret9',
            "https://hooks.example/s3kret10",
        ]
    },
}


def test_secrets_are_in_no_report(tmp_path):
    run = write_run(tmp_path / "run", disturbed_run(), **SPEC)
    run.environment.write_text(
        json.dumps({"args": "--lr 0.1 --hf-token s3kret11 --password=s3kret12"}) + "\n"
    )
    facts = facts_of(run)
    facts.resubmit_command = resubmit_command(facts.spec)
    for text in (render_run_page(facts), json.dumps(json_report(facts))):
        assert "s3kret" not in text
    page = render_run_page(facts)
    assert all(f"shown{number}" in page for number in range(1, 5))
    assert "hooks.example" in page


@pytest.mark.parametrize(
    "text",
    [
        "--max-tokens 100",
        "tokenizer=gpt2",
        "keys are sorted",
        "path=/a/b",
        "https://h/p?x=1",
        "monkey business",
    ],
)
def test_text_that_only_looks_like_a_secret_is_shown(text):
    assert redact(text) == text
    assert redact_args(text.split()) == text.split()
