"""Settings out of range are rejected at construction; Shoal's own defaults and presets pass."""

import math
from dataclasses import fields, replace

import pytest

from shoal.algorithms import ALGORITHMS, PRESETS
from shoal.errors import SettingError
from shoal.rl.ranges import RANGES, SYNONYMS, Count, Number, OneOf, Optional, Pair, Several
from shoal.runs.inputs.making import with_settings

NUMERIC = (int, float, "int", "float", "float | None")


def wrong_values(wanted):
    """Values next to a range and far from it, none of which is in it."""
    match wanted:
        case Number(low, high, above):
            finite = [x for x in (low, high) if math.isfinite(x)]
            beside = [low - 1e-6, low - 1] if finite else []
            beside += [high + 1e-6, 2 * high] if math.isfinite(high) else []
            beside += [low] if above else []
            return [*beside, math.nan, math.inf, -math.inf, "1", True]
        case Count(low):
            return [low - 1, -7, low + 0.5, 2**31, math.nan, "1", True]
        case Optional(inner):
            return [x for x in wrong_values(inner) if x is not None]
        case Pair(inner, rising):
            spoilt = [(x, 0.5) for x in wrong_values(inner)] + [(0.5,), 0.5]
            return [*spoilt, (1.0, -1.0), (1.0, 1.0)] if rising else spoilt
        case OneOf(names):
            return [names[0].upper(), "", 1, None]
        case Several(inner):
            return [(x,) for x in wrong_values(inner)]


CASES = [
    (title, setting.name)
    for title, kind in ALGORITHMS.items()
    for setting in fields(kind)
    if setting.name in RANGES
]


@pytest.mark.parametrize(("title", "name"), CASES)
def test_no_algorithm_is_made_with_a_setting_out_of_range(title, name):
    kind = ALGORITHMS[title]
    for value in wrong_values(RANGES[name]):
        with pytest.raises(SettingError, match=f"{name}=") as refused:
            kind(**{name: value})
        assert kind.__name__ in refused.value.what
        assert name in refused.value.fix
        with pytest.raises(SettingError):
            replace(kind(), **{name: value})


@pytest.mark.parametrize("kind", ALGORITHMS.values())
def test_every_number_among_the_settings_has_a_range(kind):
    assert not {f.name for f in fields(kind) if f.type in NUMERIC} - set(RANGES)


@pytest.mark.parametrize("kind", ALGORITHMS.values())
def test_a_switch_is_true_or_false(kind):
    for name in (f.name for f in fields(kind) if f.type in (bool, "bool")):
        with pytest.raises(SettingError, match=name):
            kind(**{name: 2})


def test_defaults_and_presets_pass():
    for title, kind in ALGORITHMS.items():
        for algorithm in (kind(), *(preset.algorithm for preset in PRESETS[title].values())):
            assert replace(algorithm) == algorithm


def test_a_setting_named_as_in_another_library_suggests_ours():
    has = {f.name: kind for kind in ALGORITHMS.values() for f in fields(kind)}
    assert not set(SYNONYMS) & set(has)
    for theirs, ours in SYNONYMS.items():
        with pytest.raises(SettingError) as refused:
            with_settings(has[ours](), {theirs: 1})
        assert f"`{ours}`" in refused.value.fix
