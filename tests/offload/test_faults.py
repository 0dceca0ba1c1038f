"""What goes wrong under an offloaded cache ends in an error that says which block of which layer, or in nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from kills import is_good, kill_one

from conftest import tiny_llama_config
from hf_kvplus import CacheFileError, OffloadedCache, OffloadError, build_cache
from hf_kvplus.stores import blockfile, directory
from hf_kvplus.stores.directory import INDEX_NAME, LOCK_NAME

TOKENS = 64 * 6


def make(folder: Path | None = None, base: str = "fp", budget: str = "0", **changes):
    where = "" if folder is None else f",dir={folder}"
    return build_cache(f"{base}+offload:disk,budget={budget}{where}", tiny_llama_config(**changes))


def store(cache, tokens: int = TOKENS, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in range(2):
        cache.update(*(torch.randn(1, 2, tokens, 16, generator=generator) for _ in range(2)), layer)


def step(cache) -> torch.Tensor:
    return cache.update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16), 1)[0]


def file_of(cache, layer: int = 1, name: str = "keys") -> Path:
    return cache.layers[layer].packed[name].entries[0].run.file.path


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_flipped_bit_is_found_and_named(tmp_path, prefetch):
    cache = make(tmp_path, budget=f"0,prefetch={prefetch}")
    store(cache)
    path = file_of(cache)
    content = bytearray(path.read_bytes())
    run = cache.layers[1].packed["keys"].entries[0].run
    content[3 * run.record_bytes + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        OffloadError, match=r"block 3 of the 5 held of the keys of layer 1 can't be read: the checksum"
    ):
        step(cache)
    with pytest.raises(OffloadError, match="this cache broke off earlier: block 3"):
        step(cache)
    cache.reset()
    store(cache, 100)
    assert step(cache).shape[2] == 101


def test_blocks_that_changed_places_are_told_from_the_right_ones(tmp_path):
    """Each is whole, but it isn't the one that was asked for."""
    cache = make(tmp_path)
    store(cache)
    path, size = file_of(cache), cache.layers[1].packed["keys"].entries[0].run.record_bytes
    content = path.read_bytes()
    path.write_bytes(content[size : 2 * size] + content[:size] + content[2 * size :])
    with pytest.raises(OffloadError, match="block 0 of the 5 held of the keys of layer 1"):
        step(cache)


def test_a_truncated_file_is_an_error_and_no_signal(tmp_path):
    cache = make(tmp_path)
    store(cache)
    path = file_of(cache, name="values")
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(OffloadError, match=r"block 4 of the 5 held of the values of layer 1.*is truncated"):
        step(cache)


def test_a_file_that_is_gone_is_an_error(tmp_path):
    cache = make(tmp_path)
    store(cache)
    file_of(cache).unlink()
    with pytest.raises(OffloadError, match="block 0 of the 5 held of the keys of layer 1.*No such file"):
        step(cache)


def test_a_slow_disk_only_takes_time(tmp_path, monkeypatch):
    quick, slow = make(), make(tmp_path)
    for cache in (quick, slow):
        store(cache)
    expected = step(quick)

    def slowed(call):
        return lambda *arguments: (time.sleep(0.2), call(*arguments))[1]

    for name in ("read", "scatter", "advise"):
        monkeypatch.setattr(blockfile.BlockFile, name, slowed(getattr(blockfile.BlockFile, name)))
    assert torch.equal(step(slow), expected)


FULL_DISK = """
import resource, sys, torch
sys.path.insert(0, {tests!r})
from conftest import tiny_llama_config
from hf_kvplus import OffloadError, build_cache
torch.set_num_threads(1)
cache = build_cache("fp+offload:disk,budget=0,dir={folder}", tiny_llama_config())
new = torch.ones(1, 2, 200, 16)
for layer in range(2):
    cache.update(new, new, layer)
cache.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
for attempt in range(3):
    try:
        for layer in range(2):
            cache.update(new, new, layer)
        print("stored")
    except OffloadError as error:
        print(error)
sys.stdout.flush()
import os
os._exit(0)
"""


def test_a_full_disk_stops_the_cache_and_what_was_flushed_can_be_reopened(tmp_path):
    """A limit on the size of files, as a quota sets it, in a process of its own."""
    program = FULL_DISK.format(tests=str(Path(__file__).parents[1]), folder=tmp_path)
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    lines = output.stdout.splitlines()
    assert len(lines) == 3, output.stderr
    assert any("of the keys of layer 0 can't be written to" in line for line in lines), lines
    assert "this cache broke off earlier" in lines[-1]
    cache, tokens = OffloadedCache.reopen(tiny_llama_config(), tmp_path)
    assert tokens >= 128
    for layer in cache.layers:
        assert torch.equal(layer.dense()[0], torch.ones(1, 2, tokens, 16))


def test_a_full_file_system_too(tmp_path):
    """A small file system in memory, where the user may mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "kvplus", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        cache = make(tmp_path)
        with pytest.raises(OffloadError, match=r"of layer \d can't be written to .*: No space left on device"):
            store_until_full(cache)
        with pytest.raises(OffloadError, match="broke off earlier"):
            store(cache, 1)
        cache.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def store_until_full(cache) -> None:
    for seed in range(50):
        store(cache, 128, seed)


def test_a_folder_without_permission_is_refused_before_work_starts(tmp_path, monkeypatch):
    def refused(*arguments, **options):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    if os.geteuid():
        tmp_path.chmod(0o500)
    else:  # nothing is forbidden to root
        monkeypatch.setattr(directory.os, "open", refused)
    with pytest.raises(OffloadError, match=r"`directory`: .* can't be used for offloading: Permission denied"):
        make(tmp_path)


def test_a_folder_that_couldnt_be_taken_isnt_held(tmp_path, monkeypatch):
    """Its disk was full for a moment; then nothing keeps anybody from trying again."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    with monkeypatch.context() as patch:
        patch.setattr(directory.os, "write", full)
        with pytest.raises(OffloadError, match="No space left on device"):
            make(tmp_path)
    make(tmp_path).close()


def test_leftovers_that_cant_be_removed_are_told_and_the_folder_isnt_held(tmp_path):
    stubborn = tmp_path / "kvplus-layer-0000-keys-000001.blocks"
    stubborn.mkdir()
    with pytest.raises(OffloadError, match=r"000001\.blocks can't be used for offloading"):
        make(tmp_path)
    stubborn.rmdir()
    make(tmp_path).close()


def test_a_cache_that_finds_no_folder_when_it_spills_goes_on_only_after_a_reset(tmp_path, monkeypatch):
    """Layers differ in length then: going on would give wrong text."""
    (tmp_path / "file").write_text("")
    cache = build_cache("fp+offload:auto,budget=0", tiny_llama_config())
    with monkeypatch.context() as patch:
        patch.setattr(directory.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
        with pytest.raises(OffloadError, match=r"blocks of the keys of layer 0 can't be written: .*Not a directory"):
            store(cache)
    with pytest.raises(OffloadError, match="broke off earlier: .* blocks of the keys of layer 0"):
        store(cache, 1)
    cache.reset()
    store(cache)
    assert step(cache).shape[2] == TOKENS + 1


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match="can't be used for offloading"):
        make(tmp_path / "file")


def test_two_caches_cant_have_one_folder(tmp_path):
    first = make(tmp_path)
    with pytest.raises(OffloadError, match=f"is used by another cache, of process {os.getpid()}; give each cache"):
        make(tmp_path)
    store(first)
    step(first)
    first.close()
    make(tmp_path)


def test_another_process_cant_have_it_either(tmp_path):
    program = (
        "import fcntl, os, sys\n"
        f"descriptor = os.open({str(tmp_path / LOCK_NAME)!r}, os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(descriptor, fcntl.LOCK_EX)\n"
        "os.write(descriptor, str(os.getpid()).encode())\n"
        "print('locked', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(OffloadError, match=f"of process {other.pid}"):
            make(tmp_path)
        other.kill()
        other.wait()
    make(tmp_path)


def test_what_an_ended_process_left_is_removed_and_nothing_else(tmp_path):
    for name in ("kvplus-layer-0000-keys-000001.blocks", INDEX_NAME, f".{INDEX_NAME}.abc.tmp", "mine.txt"):
        (tmp_path / name).write_text("left")
    cache = make(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {LOCK_NAME, "mine.txt"}
    store(cache)
    del cache
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt"}


def test_unnamed_folders_of_ended_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(directory.tempfile, "gettempdir", lambda: str(tmp_path))
    alive = make()
    dead = Path(alive.directory).with_name("cache-1-dead")
    dead.mkdir()
    (dead / "kvplus-layer-0000-keys-000001.blocks").write_text("left")
    other = make()
    assert not dead.exists()
    assert Path(alive.directory).is_dir()
    assert alive.directory != other.directory


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_process_leaves_a_consistent_prefix(seed):
    """`kills.py` does it a hundred times."""
    outcome = kill_one(("fp+offload:disk,budget=0", "int8,recent=16+offload:disk,budget=30kb")[seed % 2], 1000 + seed)
    assert is_good(outcome), outcome


def leave(cache) -> None:
    """Ends a cache as a killed process does: its files stay, its lock goes."""
    cache.flush()
    cache.space.trash.deferred = True
    cache.space.directory.give_up()


def test_generation_goes_on_from_what_was_left(llama, tmp_path):
    prompt = torch.randint(0, 128, (1, 300), generator=torch.Generator().manual_seed(4))
    options = {"max_new_tokens": 60, "do_sample": False}
    expected = llama.generate(prompt, past_key_values=build_cache("fp", llama.config), **options)
    left = make(tmp_path)
    llama.generate(prompt, past_key_values=left, max_new_tokens=30, do_sample=False)
    leave(left)
    cache, tokens = OffloadedCache.reopen(llama, tmp_path)
    assert tokens == cache.get_seq_length() == 256
    assert torch.equal(llama.generate(prompt, past_key_values=cache, **options), expected)
    assert {path.name for path in tmp_path.glob("*.blocks")} >= {file_of(cache).name}


def test_beams_are_reopened_with_their_rows(tmp_path):
    cache = make(tmp_path, "int8,recent=16")
    generator = torch.Generator().manual_seed(5)
    for tokens in (150, 80):
        for layer in range(2):
            cache.update(*(torch.randn(2, 2, tokens, 16, generator=generator) for _ in range(2)), layer)
        cache.reorder_cache(torch.tensor([1, 1]))
        cache.reorder_cache(torch.tensor([0, 1]))
    cache.crop(-60)
    expected = [tensor[:, :, : cache.layers[0].packed_tokens] for layer in cache.layers for tensor in layer.dense()]
    leave(cache)
    again, tokens = OffloadedCache.reopen(tiny_llama_config(), tmp_path)
    assert tokens == expected[0].shape[2]
    got = [tensor for layer in again.layers for tensor in layer.dense()]
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_reopening_refuses_what_is_damaged_foreign_or_not_there(tmp_path):
    config = tiny_llama_config()
    with pytest.raises(OffloadError, match="there is no folder"):
        OffloadedCache.reopen(config, tmp_path / "nowhere")
    with pytest.raises(OffloadError, match="has nothing to reopen"):
        OffloadedCache.reopen(config, tmp_path)
    cache = make(tmp_path)
    store(cache)
    with pytest.raises(OffloadError, match="is used by another cache"):
        OffloadedCache.reopen(config, tmp_path)
    leave(cache)
    with pytest.raises(CacheFileError, match="was written with another model"):
        OffloadedCache.reopen(tiny_llama_config(num_hidden_layers=3), tmp_path)
    path = file_of(cache)
    content = bytearray(path.read_bytes())
    content[200] ^= 4
    path.write_bytes(content)
    with pytest.raises(OffloadError, match="block 0 of the 5 held of the keys of layer 1"):
        OffloadedCache.reopen(config, tmp_path)
    content[200] ^= 4
    path.write_bytes(content)
    assert OffloadedCache.reopen(config, tmp_path)[1] == 320


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match=r'pip install "hf_kvplus\[disk\]"'):
        make()
