"""The output of `shoal algorithms`, and the errors for unsupported action spaces."""

import dataclasses
from typing import ClassVar

import pytest

from shoal.algorithms import ALGORITHMS, PPO, PRESETS
from shoal.cli.main import main
from shoal.envs.spaces import ACTIONS, Box, Discrete, Groups, MultiDiscrete
from shoal.errors import SettingError
from shoal.runs.inputs.making import check_actions, with_settings


@dataclasses.dataclass(frozen=True)
class World:
    action_space: object
    name: str = "my world"


@dataclasses.dataclass(frozen=True)
class Chooser:
    """An algorithm for discrete actions."""

    actions: ClassVar[tuple[type, ...]] = (Discrete,)


CHOICE, BOX = Discrete(2), Box(-1.0, 1.0, (3,))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_listed_with_its_paper_and_action_spaces(name, capsys):
    assert main(["algorithms"]) == 0
    kind = ALGORITHMS[name]
    printed = "\n" + capsys.readouterr().out
    entry = printed.split(f"\n{name}: ")[1].split("\n\n")[0].splitlines()
    assert entry[0]
    assert entry[1].split(maxsplit=1) == ["paper", kind.paper]
    assert set(kind.actions) <= {*ACTIONS, Groups}
    assert [word.strip(",") for word in entry[2].split()[1:]] == [s.__name__ for s in kind.actions]
    assert not PRESETS.get(name) or next(iter(PRESETS[name])) in entry[3]
    assert entry[-1].split(maxsplit=1)[0] == "agents"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_is_shown_with_its_default(name, capsys):
    assert main(["algorithms", name]) == 0
    out = capsys.readouterr().out
    for field in dataclasses.fields(ALGORITHMS[name]):
        assert f"  {field.name}: " in out
        assert f"= {field.default!r}" in out


def test_a_setting_is_shown_with_its_comment(capsys):
    main(["algorithms", "ppo"])
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line == "num_minibatches: int = 4 an epoch" for line in printed)


MIXED = Groups((("a", CHOICE), ("b", BOX)))


@dataclasses.dataclass(frozen=True)
class Captain:
    """An algorithm for heterogeneous agents with discrete actions."""

    actions: ClassVar[tuple[type, ...]] = (Discrete, Groups)


@pytest.mark.parametrize("space", [BOX, MultiDiscrete((2, 2))], ids=str)
def test_unsupported_action_spaces_are_rejected_and_alternatives_are_named(space):
    with pytest.raises(SettingError, match="Chooser can't act in my world") as caught:
        check_actions(Chooser(), World(space))
    assert "ppo" in caught.value.fix
    assert "mappo" not in caught.value.fix  # it needs a team
    assert "Discrete only" in caught.value.what


@pytest.mark.parametrize("space", [CHOICE, None], ids=str)
def test_supported_action_spaces_are_accepted(space):
    check_actions(Chooser(), World(space))


def test_heterogeneous_agents_need_an_algorithm_that_supports_each():
    for refused, space in ((Chooser(), Groups((("a", CHOICE),))), (Captain(), MIXED)):
        with pytest.raises(SettingError, match="can't act in my world") as caught:
            check_actions(refused, World(space))
        assert "mappo" in caught.value.fix
        assert "ppo," not in caught.value.fix.split()
    check_actions(Captain(), World(Groups((("a", CHOICE),))))


@pytest.mark.parametrize("space", [CHOICE, BOX, MultiDiscrete((2, 2))], ids=str)
def test_ppo_and_algorithms_without_declared_spaces_accept_every_space(space):
    check_actions(PPO(), World(space))
    check_actions(object(), World(space))


def test_a_setting_of_other_algorithms_is_rejected_with_their_names():
    with pytest.raises(SettingError, match="has no setting `clip_eps`") as caught:
        with_settings(Chooser(), {"clip_eps": 0.1})
    assert "ppo" in caught.value.fix.split(":")[1]
