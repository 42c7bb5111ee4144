"""The operator's variables: defaults that work, and a clear refusal that names the variable."""

import pytest

from everstep_operator.settings import OperatorSettings, SettingsError


def test_empty_environment_gives_working_defaults() -> None:
    settings = OperatorSettings.from_env({})
    assert (settings.port, settings.lease_seconds, settings.workers, settings.log_level) == (8080, 6, 32, "INFO")
    assert settings.checkpoint_url_prefixes == ()


def test_identity_carries_the_address_that_followers_redirect_to() -> None:
    settings = OperatorSettings.from_env(
        {"EVERSTEP_POD_NAME": "op-1", "EVERSTEP_POD_IP": "10.0.0.7", "EVERSTEP_PORT": "9000"}
    )
    assert settings.identity == "op-1_10.0.0.7:9000"


def test_identity_of_an_ipv6_pod_is_a_part_of_a_url() -> None:
    settings = OperatorSettings.from_env({"EVERSTEP_POD_NAME": "op-1", "EVERSTEP_POD_IP": "fd00:10:244::7"})
    assert settings.identity == "op-1_[fd00:10:244::7]:8080"


def test_prefixes_are_split_and_trimmed() -> None:
    settings = OperatorSettings.from_env({"EVERSTEP_CHECKPOINT_URL_PREFIXES": " s3://a/ , ,s3://b/"})
    assert settings.checkpoint_url_prefixes == ("s3://a/", "s3://b/")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EVERSTEP_PORT", "http"),
        ("EVERSTEP_PORT", "65536"),
        ("EVERSTEP_LEASE_SECONDS", "2"),
        ("EVERSTEP_LEASE_SECONDS", "-6"),
        ("EVERSTEP_WORKERS", "0"),
        ("EVERSTEP_LOG_LEVEL", "chatty"),
        ("EVERSTEP_POD_GROUPS", "volcano"),
    ],
)
def test_wrong_value_is_refused_by_the_name_of_its_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}: '{value}' is not"):
        OperatorSettings.from_env({name: value})


def test_namespaces_are_split_and_each_counts_once() -> None:
    settings = OperatorSettings.from_env({"EVERSTEP_WATCH_NAMESPACES": " team-a, team-b ,,team-a"})
    assert settings.watch_namespaces == ("team-a", "team-b")
    assert OperatorSettings.from_env({}).watch_namespaces == (), "all"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("Team", "'Team' is no name of a namespace"),
        (",".join(f"n{i}" for i in range(33)), "33 namespaces are too many"),
    ],
)
def test_namespaces_that_cannot_be_watched_are_refused(value: str, why: str) -> None:
    with pytest.raises(SettingsError, match=f"--watch-namespaces: {why}"):
        OperatorSettings.from_env({}, {"EVERSTEP_WATCH_NAMESPACES": value})


@pytest.mark.parametrize("value", [",", " ", " , ,"])
@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("EVERSTEP_WATCH_NAMESPACES", "--watch-namespaces"),
        ("EVERSTEP_CHECKPOINT_URL_PREFIXES", "--checkpoint-url-prefixes"),
        ("EVERSTEP_POD_GROUPS", "--pod-groups"),
    ],
)
def test_list_of_nothing_is_refused_and_does_not_mean_all(name: str, flag: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name}: '{value}' names nothing"):
        OperatorSettings.from_env({name: value})
    with pytest.raises(SettingsError, match=f"^{flag}: '{value}' names nothing"):
        OperatorSettings.from_env({}, {name: value})
    empty = OperatorSettings.from_env({name: ""})
    assert (empty.watch_namespaces, empty.checkpoint_url_prefixes, empty.pod_groups) == ((), (), ())


def test_switch_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(SettingsError, match="EVERSTEP_READ_NODES: 'no' is neither true nor false"):
        OperatorSettings.from_env({"EVERSTEP_READ_NODES": "no"})
