"""A damaged file, however it is damaged, is an image or a `BadImage`: never another error, a crash or a hang."""

import pytest

from tests.datasets.damage import kinds, outcome, spoil

SOME, MANY = 12, 2000


def check(folder, kind, count):
    found = [outcome(path) for path in spoil(folder, kind, count)]
    assert set(found) <= {"an image", f"BadImage of damaged{kinds()[kind][0]}"}
    assert len(set(found)) == 2 or count < MANY


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.sample(20)
def test_some_of_each_kind(tmp_path, kind):
    check(tmp_path, kind, SOME)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", kinds())
def test_many_of_each_kind(tmp_path, kind):
    check(tmp_path, kind, MANY)


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.sample(12)
def test_what_is_not_damaged_is_an_image(tmp_path, kind):
    suffix, write = kinds()[kind]
    write(tmp_path / f"a{suffix}")
    assert outcome(tmp_path / f"a{suffix}") == "an image"
