"""A table maps agents to policies; splitting by policy and joining keeps every row."""

from fnmatch import fnmatchcase

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laws.herd import Herd, herd
from shoal.envs import Box, Discrete, Environment
from shoal.errors import SettingError
from shoal.rl.routing import route

HERD = herd()


class Alike:
    """Five homogeneous agents."""

    agents = ("ally_0", "ally_1", "ally_2", "enemy_0", "enemy_1")
    observation_space = Box(0.0, 1.0, (2,))
    action_space = Discrete(3)


ALIKE = Environment("alike", Alike())
tables = st.lists(
    st.tuples(
        st.sampled_from(["ally*", "*_0", "enemy_1", "*1", "enemy*"]),
        st.sampled_from(["a", "b", "*"]),
    ),
    max_size=4,
).map(lambda lines: (*lines, ("*", "rest")))


@settings(max_examples=60, deadline=None)
@given(tables)
def test_the_first_line_that_matches_counts(table):
    found = {agent: p.name for p in route(ALIKE, table).policies for agent in p.agents}
    assert set(found) == set(Alike.agents)
    for agent, policy in found.items():
        first = next(name for pattern, name in table if fnmatchcase(agent, pattern))
        assert policy == (agent if first == "*" else first)


@settings(max_examples=40, deadline=None)
@given(tables)
def test_join_is_the_inverse_of_split(table):
    routes = route(ALIKE, table)
    x = np.arange(2 * 5 * 3).reshape(2, 5, 3)
    apart = routes.split(x)
    for p in routes.policies:
        rows = [Alike.agents.index(agent) for agent in p.agents]
        np.testing.assert_array_equal(apart[p.name], x[:, rows])
    np.testing.assert_array_equal(routes.join(apart), x)


def test_groups_are_split_and_joined_by_agent():
    routes = route(HERD, (("dog_1", "second"), ("*", "*")))
    assert [p.name for p in routes.policies] == ["dog_0", "second", "sheep_0"]
    x = {"dog": np.arange(4).reshape(2, 2), "sheep": np.array([[8], [9]])}
    apart = routes.split(x)
    assert {name: of.tolist() for name, of in apart.items()} == {
        "dog_0": [[0], [2]],
        "second": [[1], [3]],
        "sheep_0": [[8], [9]],
    }
    again = routes.join(apart)
    jax.tree.map(np.testing.assert_array_equal, again, x)


def test_without_a_table_homogeneous_agents_share_a_policy():
    assert [p.agents for p in route(ALIKE, ()).policies] == [Alike.agents]
    assert [(p.name, p.agents) for p in route(HERD, ()).policies] == list(Herd.groups)


@pytest.mark.parametrize(
    ("env", "table", "says"),
    [
        (ALIKE, (("ally*", "a"), ("enemy_0", "b")), r"no policy acts for the agent `enemy_1`"),
        (HERD, (("*", "all"),), r"`all` would act for `dog_0` and `sheep_0`.*different things"),
        (Environment("alone", type("Alone", (), {})()), (), r"alone has one agent"),
    ],
)
def test_a_table_that_cannot_work_is_rejected(env, table, says):
    with pytest.raises(SettingError, match=says):
        route(env, table)
