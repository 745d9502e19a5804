"""Faults of the profile: what is recorded, and where the time of a step is said to have gone."""

from titan.testing.faults import Fault

PROFILE = "plugins/observe/profile"

FAULTS = (
    Fault(
        "communication behind computation counted as exposed",
        f"{PROFILE}/trace.py",
        "layers = [busy, sent, {",
        "layers = [sent, busy, {",
        ("tests/unit/test_profile.py::test_a_trace_of_a_gpu",),
    ),
    Fault(
        "waits for a collective counted as computation",
        f"{PROFILE}/trace.py",
        '_WAITS = ("c10d::", "_c10d_functional::")',
        '_WAITS = ("c10d::",)',
        ("tests/unit/test_profile.py::test_a_trace_of_a_cpu",),
    ),
    Fault(
        "gloo's work given to the group that was called last",
        f"{PROFILE}/trace.py",
        "called_before(event) if thread == main else votes[thread].most_common(1)[0][0]",
        "called_before(event)",
        ("tests/unit/test_profile.py::test_a_trace_of_a_cpu",),
    ),
    Fault(
        "two exposed collectives at once counted twice",
        f"{PROFILE}/intervals.py",
        "append((max(begin, covered), end))",
        "append((begin, end))",
        ("tests/unit/test_profile.py::test_of_two_at_once_the_first_to_begin_counts",),
    ),
    Fault(
        "a recording that a run's end loses",
        f"{PROFILE}/__init__.py",
        "if self._recorder is not None and self._recording:\n            self._end",
        "if False:\n            self._end",
        ("tests/dist/test_profile.py::test_preempted_in_the_window",),
    ),
    Fault(
        "a recorded step that leaves out its wait for data",
        f"{PROFILE}/__init__.py",
        "elif step + 1 == self.config.from_step:",
        "elif False:",
        ("tests/dist/test_profile.py::test_the_same_curve_to_the_bit_and_a_row_of_seconds[one rank]",),
    ),
    Fault(
        "a full disk that ends a run by its profile",
        f"{PROFILE}/__init__.py",
        "_FAILURES = (OSError, EOFError,",
        "_FAILURES = (EOFError,",
        (
            "tests/unit/test_profile.py::test_a_recording_that_fails_ends_no_run[full disk]",
            "tests/dist/test_profile.py::test_files_that_cannot_be_written_end_no_run",
        ),
    ),
    Fault(
        "a profiler that cannot start ends a run",
        f"{PROFILE}/__init__.py",
        'with self._survived("cannot start the profiler"):\n            self._recorder.begin(step)',
        "if True:\n            self._recorder.begin(step)",
        ("tests/unit/test_profile.py::test_a_profiler_that_does_not_start_ends_no_run[start]",),
    ),
    Fault(
        "collectives and allocations recorded after a profiler that did not stop",
        f"{PROFILE}/recorder.py",
        "self._listening = listening.pop_all()",
        "listening.pop_all()",
        ("tests/unit/test_profile.py::test_a_recording_that_fails_ends_no_run[stop]",),
    ),
    Fault(
        "a failed run that waits for its device to stop the profiler",
        f"{PROFILE}/recorder.py",
        "if not whole and self._on_device:",
        "if False:",
        ("tests/unit/test_profile.py::test_an_error_of_the_run_in_the_window[cuda-False]",),
    ),
    Fault(
        "a trace of any size read",
        f"{PROFILE}/__init__.py",
        "if written.size > MOST_BYTES:",
        "if False:",
        ("tests/unit/test_profile.py::test_a_large_trace_is_not_read",),
    ),
    Fault(
        "steps that the profiler dropped not noticed",
        f"{PROFILE}/trace.py",
        "if len(done.steps) < steps:",
        "if False:",
        ("tests/unit/test_profile.py::test_steps_that_the_profiler_dropped",),
    ),
    Fault(
        "a pipeline's batches of sends counted for all ranks",
        f"{PROFILE}/trace.py",
        "batches if in_batch else groups.get",
        "groups.get",
        ("tests/unit/test_profile.py::test_a_batch_of_sends_names_no_group",),
    ),
    Fault(
        "batches of sends between workers counted for all ranks",
        f"{PROFILE}/trace.py",
        "return next(stages, layout.worker_axis)",
        'return next(stages, "")',
        ("tests/unit/test_profile.py::test_the_axis_of_a_batch_is_found_by_facts",),
    ),
)
