"""Explain a state, a pending reason, an exit code, a failure kind or an option (`hpctrain explain`)."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click

from hpctrain.cli.common import echo_json, json_option, walk_commands
from hpctrain.jobs.options.option_table import all_options
from hpctrain.jobspec.restart_policy import DEFAULT_RULES, END_KINDS, RESTART_ACTIONS, EndKind
from hpctrain.slurm.exit_codes import EXIT_CODES, SIGNALS, explain_exit
from hpctrain.slurm.pending_reasons import PENDING_REASONS, explain_reason
from hpctrain.slurm.states import RUN_STATES, SLURM_STATES, base_state
from hpctrain.text import pluralize, suggest

_REASON = "pending reason of Slurm"
#: Kinds whose words are parsed, not compared.
_PARSED = ("exit code", "signal")


@dataclass(frozen=True)
class Explanation:
    word: str
    kind: str
    meaning: str
    aliases: tuple[str, ...] = ()


@click.command("explain", context_settings={"ignore_unknown_options": True})
@click.argument("word", required=False)
@json_option
@click.pass_context
def command(context: click.Context, word: str | None, as_json: bool) -> None:
    """Explain WORD, and what to do about it.

    WORD is a Slurm job state (OUT_OF_MEMORY or OOM), a run state, a pending reason (Priority), an exit code
    or signal (137, 0:9, SIGKILL), a failure kind (node-lost), a restart action or an option (--time). Without
    WORD, list all known words.
    """
    explanations = [*_tables(), *_options(context)]
    if word is None:
        by_kind: dict[str, list[str]] = {}
        for explanation in explanations:
            kind = "option" if explanation.word.startswith("-") else explanation.kind
            by_kind.setdefault(kind, []).append(explanation.word)
        if as_json:
            echo_json(by_kind)
            return
        for kind, names in by_kind.items():
            click.echo(f"{kind}\n{_indented(' '.join(dict.fromkeys(names)))}")
        return
    meanings = _find(word, explanations)
    if not meanings:
        names = [str(explanation.word) for explanation in explanations]
        spellings = (word, word.upper(), word.lower())
        hints = filter(None, (suggest(spelling, names, otherwise="") for spelling in spellings))
        raise click.UsageError(
            f"Unknown word {word!r}. {next(hints, 'Run `hpctrain explain` to list the known words.')}"
        )
    if as_json:
        echo_json([asdict(meaning) for meaning in meanings])
        return
    texts = []
    for meaning in meanings:
        title = ", ".join((meaning.word, *meaning.aliases))
        texts.append(f"{title} ({meaning.kind})\n{_indented(meaning.meaning)}")
    click.echo("\n\n".join(texts))


def _find(text: str, explanations: list[Explanation]) -> list[Explanation]:
    """Return all meanings of a text, also in the form of squeue: `(ReqNodeNotAvail, …)`, `CANCELLED by 1`."""
    name = base_state(text.strip("() ").partition(",")[0])
    meanings = [
        explanation
        for explanation in explanations
        if explanation.kind not in _PARSED and _key(name) in {_key(alias) for alias in _names(explanation)}
    ]
    meanings += [Explanation(name, kind, _sentence(meaning)) for kind, meaning in explain_exit(name)]
    if not meanings and (reason := explain_reason(name, "JOB")) != name:
        meanings = [Explanation(name, _REASON, _sentence(reason.removeprefix(f"{name}: ")))]
    return meanings


def _names(explanation: Explanation) -> set[str]:
    names = {explanation.word, *explanation.aliases}
    return names | {name.removeprefix("--") for name in names}


def _key(text: str) -> str:
    """Return a word without differences in case and separators. Short options differ in case."""
    return text if len(text) == 2 and text.startswith("-") else text.lower().replace("_", "-")


def _tables() -> Iterator[Explanation]:
    for name, slurm in SLURM_STATES.items():
        yield Explanation(name, "state of Slurm", slurm.meaning, (slurm.code,) if slurm.code else ())
    for state, meaning in RUN_STATES.items():
        yield Explanation(state, "state of a run", meaning)
    for reason, meaning in PENDING_REASONS.items():
        yield Explanation(reason, _REASON, _sentence(meaning.format(job_id="JOB")))
    for name in (*map(str, EXIT_CODES), *(signal.Signals(number).name for number in SIGNALS)):
        for kind, meaning in explain_exit(name):
            yield Explanation(name, kind, _sentence(meaning))
    for end in END_KINDS:
        yield Explanation(end, "failure kind", _describe_end(end))
    for action, meaning in RESTART_ACTIONS.items():
        yield Explanation(action, "restart action", f"hpctrain {meaning}.")


def _describe_end(end: EndKind) -> str:
    """Return the cause of an end, the action of the policy with its limits, and the advice to users."""
    info, rule = END_KINDS[end], DEFAULT_RULES.get(end)
    sentences = [_sentence(info.cause)]
    if action := RESTART_ACTIONS.get(info.action):
        sentences.append(f"hpctrain {action}.")
    if rule and rule.retries is None:
        sentences.append("--max-failures limits the restarts without a new checkpoint.")
    elif rule and rule.retries:
        option = f"--restart-policy {end}.retries"
        sentences.append(f"The limit is {rule.retries} times in a row without a new checkpoint ({option}).")
    if rule and rule.exclude:
        sentences.append(f"After {pluralize(rule.exclude, 'failure')} on a node, hpctrain excludes the node.")
    return " ".join([*sentences, *([_sentence(info.advice)] if info.advice else [])])


def _options(context: click.Context) -> Iterator[Explanation]:
    """Yield the options of all commands. Commands whose options are the same share an explanation."""
    commands: dict[tuple[tuple[str, ...], str], list[str]] = {}
    root = context.find_root()
    assert isinstance(root.command, click.Group)
    for path, command_context in [("", root), *walk_commands(root.command)]:
        for param in command_context.command.params:
            if isinstance(param, click.Option) and (record := param.get_help_record(command_context)):
                # The first long name is the one of the documentation.
                names = tuple(sorted((*param.opts, *param.secondary_opts), key=lambda name: name[:2] != "--"))
                meaning = f"{record[0]}: {' '.join(record[1].split())}"
                commands.setdefault((names, meaning), []).append(path)
    for ((name, *aliases), meaning), paths in commands.items():
        yield Explanation(name, f"option of hpctrain {', '.join(paths)}".rstrip(), meaning, tuple(aliases))
    for option in all_options().values():
        if not option.on_command_line:
            yield Explanation(option.name, "option in configuration files", option.help)


def _indented(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _sentence(text: str) -> str:
    initial = text[0] if text.startswith(("hpctrain", "slurm.log")) else text[0].upper()
    return f"{initial}{text[1:]}" + ("" if text.endswith(".") else ".")
