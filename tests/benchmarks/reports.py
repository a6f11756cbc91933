"""`python -m tests.benchmarks.reports` shows what comes of public bug reports of other projects' users, and after how long.

Each row is a kind of reports (of torch, transformers, datasets, trl, Ray and others), by what is given to Slotline. It
names what comes and the tests that show it, which this runs: `equal` beside a plain loop or torch's own, or `refused`, by
name and with the way out, or `found` by `slotline verify` where it is planted. Fails where a test does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
_LIMIT_S = 1800.0
_TRIED = "worker/checks/test_loss_reduction.py"
_REDUCED = "worker/jobs/test_loss_reduction.py"
_BATCHES = "worker/verify/test_batch_losses.py"
_MEANS = f"{_TRIED}::test_a_loss_that_is_the_mean_of_its_samples_passes"
_OTHERS = f"{_TRIED}::test_a_loss_that_is_no_mean_of_its_samples_is_refused_with_both_values"


@dataclass(frozen=True)
class Row:
    """A kind of input, what comes of it, and the tests that show it: paths below tests/ with a function, maybe a value."""

    given: str
    comes: str
    tests: tuple[str, ...]


REPORTS = (
    Row(
        "class weights of cross entropy, counted by tokens",
        "equal",
        (f"{_REDUCED}::test_a_loss_that_divides_by_something_else_trains_as_the_whole_batch[class weights]",),
    ),
    Row(
        "a causal loss that shifts its labels itself",
        "refused, or equal where it says its count",
        (
            f"{_TRIED}::test_labels_that_the_loss_shifts_are_counted_otherwise_and_refused",
            f"{_TRIED}::test_a_loss_that_says_its_count_is_weighed_by_it",
            f"{_REDUCED}::test_a_loss_whose_parts_are_not_the_batch_is_refused_before_training",
        ),
    ),
    Row(
        "a step in which nothing is a target",
        "changes nothing, an event",
        (f"{_REDUCED}::test_a_step_without_any_target_changes_nothing_and_says_so",),
    ),
    Row(
        "a masked mean with a microbatch without targets",
        "equal",
        (
            f"{_REDUCED}::test_a_loss_that_divides_by_something_else_trains_as_the_whole_batch"
            "[a mean that says its count]",
        ),
    ),
    Row(
        "a stream that was resumed, at its epoch's end",
        "equal",
        (
            "worker/data/test_stream.py::test_epochs_follow_each_other_as_in_a_plain_loop",
            "worker/data/test_stream.py::test_a_place_is_found_again_to_the_sample",
        ),
    ),
    Row(
        "fewer samples than a batch",
        "refused",
        (
            "worker/actor/test_batch_feed.py::test_data_of_fewer_samples_than_a_batch_is_refused_with_both_numbers",
        ),
    ),
    Row(
        "a factory inside arguments of losses, optimizers, schedules",
        "built first",
        (
            "worker/actor/test_training.py::test_a_factory_in_an_argument_of_a_loss_is_built_first_and_goes_to_the_device",
            "worker/actor/test_training.py::test_a_factory_in_an_argument_of_an_optimizer_or_of_its_groups_is_built_first",
            "worker/actor/test_training.py::test_a_factory_in_an_argument_of_a_schedule_is_built_first",
        ),
    ),
    Row(
        "a module of the user's named like one of Python's",
        "refused",
        ("service/cli/test_submit.py::test_code_that_would_stand_in_the_way_of_slotline_is_refused_by_name",),
    ),
    Row(
        "a cancel that the driver, or Ray, does not obey",
        "accelerators free at its end",
        (
            "service/orchestrator/test_loop.py::test_a_driver_that_ignores_the_cancel_is_stopped",
            "service/orchestrator/test_loop.py::test_a_driver_that_ray_does_not_stop_keeps_no_cancelled_job",
        ),
    ),
    Row(
        "a print in a job on the local Ray",
        "in slotline logs",
        ("service/orchestrator/ray/test_local_ray.py::test_everything_that_the_orchestrator_asks_of_ray",),
    ),
    Row(
        "a link in the folder of code",
        "followed, or refused",
        (
            "service/client/test_code_folder.py::test_what_links_lead_to_is_in_the_zip_by_the_links_names",
            "service/client/test_code_folder.py::test_a_link_that_leads_nowhere_is_named",
            "service/client/test_code_folder.py::test_a_link_that_leads_round_in_a_circle_is_named",
        ),
    ),
    Row(
        "a folder of code that is too large, with a venv in it",
        "left out, refused with the largest files",
        (
            "service/client/test_code_folder.py::test_caches_and_virtual_environments_by_any_name_stay_out",
            "service/client/test_code_folder.py::test_what_git_ignores_stays_out",
            "service/client/test_code_folder.py::test_a_folder_that_is_too_large_names_its_largest_files_and_the_way_out",
        ),
    ),
    Row(
        "a field of a sample that is None",
        "refused",
        ("worker/data/test_data.py::test_collate_names_what_is_none",),
    ),
    Row(
        "a schedule that ends before training does",
        "refused",
        (
            "worker/actor/test_training.py::test_a_schedule_that_ends_before_the_training_is_refused_with_the_step",
        ),
    ),
    Row(
        "one row a microbatch with batch norm",
        "refused",
        (
            "worker/model/test_trace.py::test_a_batch_norm_of_one_row_is_refused_with_the_settings_that_give_more",
        ),
    ),
    Row(
        "a TMPDIR too long for Ray's sockets",
        "refused",
        (
            "service/orchestrator/ray/test_local_ray.py"
            "::test_a_folder_whose_name_leaves_no_room_for_sockets_is_refused_at_once",
        ),
    ),
    Row(
        "a disk that is full at a checkpoint",
        "told with the ways out",
        (
            "worker/checkpoint/test_format.py::test_a_full_disk_is_named_with_the_ways_out",
            "worker/driver/test_asynchronous_saving.py::test_a_full_disk_is_told_and_the_next_checkpoint_is_tried",
        ),
    ),
    Row(
        "a wrong field, without a server",
        "refused in the server's words",
        ("service/cli/test_check.py::test_wrong_fields_are_told_all_at_once_in_the_servers_words",),
    ),
    Row(
        "lengths that change",
        "refused",
        (
            "worker/verify/test_stateful_models.py::test_samples_of_which_every_eighth_is_longer_are_refused_by_name",
        ),
    ),
)
LOSSES = (
    *(
        Row(name, "equal: a mean of its samples", (f"{_MEANS}[{name}]",))
        for name in (
            "focal",
            "dice of each sample",
            "ctc",
            "margin ranking",
            "BCE with pos_weight",
            "huber",
            "KL batchmean",
            "cosine embedding",
            "label smoothing",
        )
    ),
    *(
        Row(name, "refused with both values and the ways out", (f"{_OTHERS}[{name}]",))
        for name in ("dice of the batch", "contrastive", "perplexity")
    ),
    Row(
        "label smoothing and targets that are ignored",
        "equal",
        (f"{_TRIED}::test_cross_entropy_weighs_as_torch_divides",),
    ),
    Row("a sum", "refused", (f"{_TRIED}::test_a_sum_is_called_a_sum",)),
    Row(
        "a mask of its own",
        "refused without a count",
        (f"{_TRIED}::test_a_mask_of_its_own_is_refused_without_a_count",),
    ),
)
PLANTED = (
    Row(
        "class weights that are not counted",
        "found",
        (f"{_BATCHES}::test_class_weights_that_are_not_counted_are_found",),
    ),
    Row(
        "shifted labels; a mean of unequal microbatches; a model's own loss",
        "found",
        (f"{_BATCHES}::test_microbatches_that_do_not_make_up_the_batch_are_a_difference",),
    ),
    Row("a step without targets", "noted", (f"{_BATCHES}::test_a_step_without_targets_is_noted",)),
    Row("a mean over nothing", "found", (f"{_BATCHES}::test_a_mean_over_nothing_that_is_called_is_found",)),
    Row(
        "a stream that begins its next epoch where it was sent to",
        "found",
        (
            "worker/verify/test_shared_parts.py"
            "::test_a_stream_that_begins_its_next_epoch_where_it_was_sent_to_is_found",
        ),
    ),
    Row(
        "too few samples for a step",
        "no proof",
        (f"{_BATCHES}::test_too_few_samples_for_a_step_are_no_proof_of_anything",),
    ),
)


def main() -> int:
    """Run the tests of all rows, print the three tables; 1 where a test fails or is not there."""
    tables = {
        "What was given": REPORTS,
        "Loss": LOSSES,
        "Planted, for `slotline verify`": PLANTED,
    }
    results = _run([test for rows in tables.values() for row in rows for test in row.tests])
    failed = 0
    for title, rows in tables.items():
        print(f"| {title} | comes | tests | s |\n|---|---|---|---|")
        for row in rows:
            seconds = [found for test in row.tests for found in _of(results, test)]
            wrong = not seconds or None in seconds
            failed += wrong
            took = sum(second or 0.0 for second in seconds)
            print(f"| {row.given} | {'FAILED' if wrong else row.comes} | {len(seconds)} | {took:.2f} |")
        print()
    return 1 if failed else 0


def _run(tests: Sequence[str]) -> dict[str, float | None]:
    """Seconds of each test that was run, by its id below tests/; None for one that did not pass."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        given = sorted({f"tests/{test}" for test in tests})
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CI": "true"}
        subprocess.run([*command, *given], cwd=ROOT, env=environment, stdout=sys.stderr, timeout=_LIMIT_S)
        found: dict[str, float | None] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            path = case.get("classname", "").removeprefix("tests.").replace(".", "/") + ".py"
            passed = (
                case.find("failure") is None and case.find("error") is None and case.find("skipped") is None
            )
            found[f"{path}::{case.get('name')}"] = float(case.get("time", 0)) if passed else None
        return found


def _of(results: dict[str, float | None], test: str) -> list[float | None]:
    """Those of one value of a test, or of all of its values."""
    return [took for name, took in results.items() if name == test or name.startswith(f"{test}[")]


if __name__ == "__main__":
    sys.exit(main())
