"""The embedded corpus."""

import pathlib
import sysconfig

from jaxpretrain.data import stdlib


def test_files_are_the_library_and_only_that():
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root).as_posix() for path in stdlib.files()]
    assert {"ast.py", "asyncio/events.py", "json/decoder.py", "typing.py"} <= set(names)
    assert len(names) == len(set(names)) > 300
    for part in ("site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings"):
        assert not [name for name in names if part in name.split("/")[:-1]]
    modules = [name for name in names if not name.startswith("pydoc_data")]
    assert modules == sorted(modules)


def test_documents():
    texts = list(stdlib.documents())
    assert texts == list(stdlib.documents())
    assert 5_000_000 < sum(map(len, texts)) < 50_000_000
    assert (pathlib.Path(sysconfig.get_paths()["stdlib"]) / "ast.py").read_text() in texts


def test_topics_are_prose_not_source(tmp_path):
    source = (
        '# -*- coding: utf-8 -*-\ntopics = {\'assert\': \'The "assert" statement\\n***\\n\', "del": """Deletion\n"""}\n'
    )
    assert list(stdlib._topics(source)) == ['The "assert" statement\n***\n', "Deletion\n"]
