"""The mean of several workers' profiles of one model."""

from dataclasses import replace

import pytest

from worker.contract.profile import HostCost, LayerCost, LayerProfile, mean_profile, slowest_profile


def profile(*forward_s: float) -> LayerProfile:
    layers = tuple(LayerCost(f"l{i}", f, 2 * f, 3 * f, 7, 5, 4) for i, f in enumerate(forward_s))
    return LayerProfile(layers, (), "cpu", "1 x 2", {})


def test_times_are_averaged_and_sizes_stay():
    mean = mean_profile([profile(1.0, 2.0), profile(3.0, 6.0)])
    assert [c.forward_s for c in mean.layers] == [2.0, 4.0]
    assert [c.backward_weight_s for c in mean.layers] == [6.0, 12.0]
    assert [c.activation_bytes for c in mean.layers] == [7, 7]


def test_profiles_of_different_layers_are_refused():
    other = profile(1.0, 2.0)
    other = replace(other, layers=tuple(replace(c, name=f"x{c.name}") for c in other.layers))
    with pytest.raises(ValueError, match="different layers"):
        mean_profile([profile(1.0, 2.0), other])


def test_of_several_kinds_the_slowest_is_planned_with_and_the_largest_correction():
    quick, slow = profile(1.0, 9.0), profile(4.0, 7.0)
    found = slowest_profile([replace(quick, activation_factor=1.5), slow])
    assert found == replace(slow, activation_factor=1.5)
    with pytest.raises(ValueError, match="different layers"):
        slowest_profile([quick, profile(1.0)])


def test_the_hosts_of_several_workers_have_their_mean_too_where_all_were_measured():
    one, other = (
        replace(found, layers=tuple(replace(layer, host=HostCost(*times)) for layer in found.layers))
        for found, times in (
            (profile(1.0, 2.0), (0.25, 0.5, 0.75, 1.0)),
            (profile(3.0, 6.0), (0.75, 1.0, 1.75, 5.0)),
        )
    )
    mean = mean_profile([one, other])
    assert {layer.host for layer in mean.layers} == {HostCost(0.5, 0.75, 1.25, 3.0)}
    assert LayerProfile.from_json(mean.to_json()) == mean
    assert {layer.host for layer in mean_profile([one, profile(1.0, 2.0)]).layers} == {None}
