"""Clusters and queues as the environment gives them."""

import pytest
from pydantic import ValidationError

from service.cli.output import CliError
from service.cli.serve import settings_or_fail
from service.orchestrator.ray.clusters import driver_settings, ray_cluster
from service.settings.settings import Settings

EAST = '{"east": {"address": "http://east:8265/", "workers_per_gpu": 2, "driver_url": "http://here:80/"}}'


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch):
    def give(**variables: str) -> Settings:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Settings()

    return give


def test_the_settings_of_one_cluster_mean_the_one_named_default(given):
    settings = given(RAY_ADDRESS="http://head:8265", SLOTLINE_QUEUES='{"a": 4}')
    assert settings.has_default_cluster and settings.clusters == {} and settings.quotas == {"a": 4}
    assert settings.cluster_of("a") == settings.cluster_of("one that is gone") == "default"
    assert ray_cluster(settings, "default").address == "http://head:8265"


def test_a_queue_belongs_to_the_cluster_that_it_names_and_else_to_the_default_one(given):
    settings = given(
        SLOTLINE_CLUSTERS=EAST, SLOTLINE_QUEUES='{"a": 4, "b": {"quota": 2, "cluster": "east"}, "c": null}'
    )
    assert settings.quotas == {"a": 4, "b": 2, "c": None}
    assert [settings.cluster_of(queue) for queue in "abc"] == ["default", "east", "default"]
    assert settings.cluster_of("gone") is None, "it may have been a queue of another cluster"
    drivers = driver_settings(settings, "east")
    assert (drivers.workers_per_gpu, drivers.url) == (2, "http://here:80")
    assert ray_cluster(settings, "east").address == "http://east:8265"


def test_without_an_address_and_without_a_queue_there_is_no_default_cluster(given):
    settings = given(SLOTLINE_CLUSTERS=EAST, SLOTLINE_QUEUES='{"b": {"cluster": "east"}}')
    assert not settings.has_default_cluster and [*settings.clusters] == ["east"]
    assert given(RAY_ADDRESS="http://head:8265").has_default_cluster


def test_a_queue_of_an_unknown_cluster_is_refused_with_the_names_that_there_are(given):
    with pytest.raises(ValidationError, match=r"queue b belongs to the cluster 'esat'.*default, east"):
        given(SLOTLINE_CLUSTERS=EAST, SLOTLINE_QUEUES='{"b": {"cluster": "esat"}}')


@pytest.mark.parametrize(
    ("clusters", "says"),
    [
        ('{"default": {"address": "http://x:1"}}', "the cluster of RAY_ADDRESS"),
        ('{"east": {"address": "east:6379"}}', "over HTTP"),
        ('{"east": {"address": "http://x:1", "adress": 1}}', "adress"),
        ('{"east": {}}', "address"),
        ('{"east": {"address": "http://x:1", "token": " "}}', "blank token"),
        ('{"east": {"address": "http://x:1", "token": "a", "token_variable": "B"}}', "both given"),
        ('{"east": {"address": "http://x:1", "token_variable": "NOT_THERE"}}', "NOT_THERE"),
        ('{"a b": {"address": "http://x:1"}}', "a b"),
    ],
)
def test_wrong_clusters_are_refused_by_name(given, clusters, says):
    with pytest.raises(ValidationError, match=says):
        given(SLOTLINE_CLUSTERS=clusters)


def test_no_message_about_clusters_shows_their_tokens(monkeypatch: pytest.MonkeyPatch):
    wrong = '{"east": {"address": "http://x:1", "token": "hush-hush", "token_variable": "B"}}'
    monkeypatch.setenv("SLOTLINE_CLUSTERS", wrong)
    with pytest.raises(CliError) as refused:
        settings_or_fail()
    assert "both given" in str(refused.value) and "hush" not in str(refused.value)


@pytest.mark.parametrize("form", ["token", "token_variable"])
def test_each_cluster_has_a_token_of_its_own(given, form):
    told = {"token": '"of-east\\n"', "token_variable": '"EAST_TOKEN"'}[form]
    settings = given(
        EAST_TOKEN="of-east\n",
        RAY_AUTH_TOKEN="of-default",
        SLOTLINE_CLUSTERS=f'{{"east": {{"address": "http://x:1", "{form}": {told}}}}}',
    )
    assert settings.clusters["east"].ray_token == "of-east"
    assert settings.ray_tokens == ["of-default", "of-east"]
    assert "of-east" not in repr(settings)
    sent = ray_cluster(settings, "east")._client.headers["Authorization"]
    assert sent == "Bearer of-east"


def test_submitters_are_refused_where_nobody_says_who_calls(given):
    with pytest.raises(ValidationError, match="queue few names its submitters, and no token says who calls"):
        given(SLOTLINE_QUEUES='{"few": {"submitters": ["alice"]}}')


def test_a_queue_admits_whom_it_names(given):
    queues = '{"open": null, "few": {"submitters": ["alice", "ci-*"]}}'
    settings = given(SLOTLINE_QUEUES=queues, SLOTLINE_REQUIRE_TOKEN="true")
    assert settings.queues["open"].admits("anybody")
    few = settings.queues["few"]
    assert [few.admits(name) for name in ("alice", "ci-7", "malice", "ci", "Alice", "")] == [
        True,
        True,
        *4 * [False],
    ]
