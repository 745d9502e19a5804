"""Faults of the attention kernel for CPUs: what it is given, what is kept of it, and when it is made anew."""

from titan.testing.faults import Fault

TESTS = "tests/unit/test_cpu_attention.py"
LIBRARY = "tests/unit/test_cpu_kernel_library.py"
KERNEL = "plugins/attention/cpu_kernel.py"

FAULTS = (
    Fault("a library taken from a temporary folder that others can write", f"{KERNEL}::_opened_elsewhere",
        "not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022",
        "not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid()",
        (f"{LIBRARY}::test_a_home_that_cannot_be_written_has_the_library_in_a_folder_of_this_user",)),
    Fault("a damaged library of the cache loaded as it is", f"{KERNEL}::_is_whole",
        "hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]", "True",
        (f"{LIBRARY}::test_a_damaged_library_is_made_again",)),
    Fault("documents that the kernel is not told of", f"{KERNEL}::_call",
        "0 if documents is None else documents.data_ptr()", "0",
        (f"{TESTS}::test_no_further_from_exact_numbers_than_pytorch",
         f"{TESTS}::test_blocks_in_which_nothing_is_seen_are_not_read")),
    Fault("a tensor with gaps within its rows given to the kernel as it is", f"{KERNEL}::_call",
        "x if x.stride(-1) == 1 else x.contiguous()", "x",
        (f"{TESTS}::test_the_same_bits_however_tensors_lie_in_memory",)),
    Fault("a kernel of an older source taken for that of the present one", f"{KERNEL}::_opened",
        '[source.read_bytes(), (SOURCES / "cpu_kernel.h").read_bytes(), *map(os.fsencode, words)]',
        '[(SOURCES / "cpu_kernel.h").read_bytes(), *map(os.fsencode, words)]',
        (f"{LIBRARY}::test_another_source_is_another_library",)),
    Fault("a kernel of an older header taken for that of the present one", f"{KERNEL}::_opened",
        '[source.read_bytes(), (SOURCES / "cpu_kernel.h").read_bytes(), *map(os.fsencode, words)]',
        "[source.read_bytes(), *map(os.fsencode, words)]", (f"{LIBRARY}::test_another_source_is_another_library",)),
    Fault("attention in bfloat16 that is computed in float32 and not rounded", f"{KERNEL}::_attention",
        "out.to(q.dtype)", "out", (f"{TESTS}::test_bfloat16_by_the_kernel_of_float32_is_rounded_once",)),
)
