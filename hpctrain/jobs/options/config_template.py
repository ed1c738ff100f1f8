"""Write the template of a configuration file: every option with meaning and default, commented out."""

from __future__ import annotations

import textwrap
from itertools import groupby

from hpctrain.jobs.options.option import Option
from hpctrain.jobs.options.option_table import all_options

_WIDTH = 100

_HEAD = """\
# Default options of `hpctrain submit` in this project. The command line overrides them.
# `hpctrain submit --show-config SCRIPT` shows each value and its source.
#
# To set an option, remove the # before its line. A key without a value removes a value that is set in
# /etc/hpctrain/*.yaml (for all users) or ~/.config/hpctrain/config.yaml. These files have the same format.
"""

_SBATCH = """
# Every other option of sbatch, with underscores. For example:
#partition: gpu
#account: physics
#qos: long
#constraint: ib&ssd
#mem: 64G
#exclusive: true
#mail_type: END,FAIL
"""

_PROFILES = """
# ---- Profiles

# Named sets of options. --profile NAME selects one.
#profiles:
#  debug:
#    nodes: 1
#    time: 10
"""


def config_template() -> str:
    """Return the text of the template. It is valid unchanged and with any line uncommented."""
    in_files = [option for option in all_options().values() if option.in_files]
    sections = [_HEAD]
    for group, members in groupby(in_files, lambda option: option.group):
        sections.append(f"\n# ---- {group}\n")
        sections.extend(map(_entry, members))
    return "".join([*sections, _SBATCH, _PROFILES])


def _entry(option: Option) -> str:
    help_lines = textwrap.wrap(option.help, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    empty = "{}" if option.kind.pairs else "[]" if option.kind.many else ""
    value = empty if option.default is None else str(option.default)
    example = f"{{{option.example}}}" if option.kind.pairs else option.example
    comments = [
        f"default: {option.default_text}" if option.default is None and option.default_text else "",
        f"example: {example}" if example else "",
        str(option.kind) if option.kind.choices else "",
    ]
    comment = "; ".join(filter(None, comments))
    line = f"#{option.name}:" + (f" {value}" if value else "") + (f"  # {comment}" if comment else "")
    return "\n".join(["", *help_lines, line, ""])
