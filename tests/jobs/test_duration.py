import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import SpecError
from hpctrain.slurm.parsing import format_time_limit, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("01:02:03", 3723),
        ("1-0", 86400),
        ("1-2", 93600),
        ("1-2:3", 93780),
        ("1-02:03:04", 93784),
        ("unlimited", None),
        ("INFINITE", None),
    ],
)
def test_durations_in_sbatch_format_are_parsed(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0:00", "1h", "-5", "1:2:3:4", "1-", "1.5", " 5", "5\n", "٣"])
def test_other_formats_are_refused(text):
    with pytest.raises(SpecError, match="duration"):
        parse_duration(text)


@given(st.integers(1, 10**8))
def test_formatted_time_limit_is_parsed_back(seconds):
    assert parse_duration(format_time_limit(seconds)) == seconds
