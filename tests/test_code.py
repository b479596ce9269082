from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import PurePosixPath

import pytest
from conftest import ROOT, STDLIB, clean_environment
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_ft.data.code import (
    FIM_TOKENS,
    PERMISSIVE,
    FimIds,
    fim_ids,
    fim_parts,
    ignored_by_git,
    imports,
    is_generated,
    license_of,
    order_files,
    path_comment,
    repository_documents,
    repository_license,
    split_fim,
)
from deepseek_ft.errors import ConfigError

TEXTS = [f"def f{i}(x):\n    return x + {i * i}\n" for i in range(2000)]
BEGIN, HOLE, END = FIM_TOKENS

# ------------------------------------------------------------------------------------- fill in the middle


def test_ids_are_those_of_the_vocabulary():
    coder = {"<｜fim▁begin｜>": 32016, "<｜fim▁hole｜>": 32015, "<｜fim▁end｜>": 32017, "a": 0}
    assert fim_ids(coder) == FimIds(begin=32016, hole=32015, end=32017)


def test_a_vocabulary_without_the_sentinels_is_refused_with_the_way_out():
    with pytest.raises(ConfigError) as caught:
        fim_ids({BEGIN: 1, "b": 2})
    assert HOLE in str(caught.value) and END in str(caught.value) and BEGIN not in str(caught.value)
    assert "data.code.fim_rate=0" in str(caught.value)


@settings(deadline=None)
@given(st.text(min_size=1), st.integers(), st.floats(0, 1))
def test_the_parts_join_back_to_the_text(text, seed, spm_rate):
    kind, (prefix, suffix, middle) = split_fim(text, seed, 1.0, spm_rate)
    assert prefix + middle + suffix == text
    assert kind == {0.0: "psm", 1.0: "spm"}.get(spm_rate, kind)


def test_rates_are_shares_of_documents():
    def kinds(rate, spm_rate):
        return [done and done[0] for done in (split_fim(text, 7, rate, spm_rate) for text in TEXTS)]

    assert kinds(0.0, 0.5) == [None] * 2000
    assert kinds(1.0, 0.0) == ["psm"] * 2000 and kinds(1.0, 1.0) == ["spm"] * 2000
    cut = [kind for kind in kinds(0.5, 0.5) if kind]
    assert abs(len(cut) - 1000) < 4 * (2000 * 0.25) ** 0.5  # four standard deviations
    assert abs(cut.count("spm") - len(cut) / 2) < 4 * (len(cut) * 0.25) ** 0.5
    assert abs(2000 - kinds(0.9, 0.5).count(None) - 1800) < 4 * (2000 * 0.09) ** 0.5


def test_a_higher_rate_cuts_the_same_documents_and_more():
    low = {text: split_fim(text, 1, 0.3, 0.5) for text in TEXTS}
    high = {text: split_fim(text, 1, 0.6, 0.5) for text in TEXTS}
    assert all(high[text] == done for text, done in low.items() if done)
    assert sum(done is not None for done in high.values()) > sum(done is not None for done in low.values())


def test_cuts_are_uniform_and_depend_on_the_seed():
    places = []
    for text in TEXTS:
        _, (prefix, _, middle) = split_fim(text, 3, 1.0, 0.5)
        places += [len(prefix) / len(text), len(prefix + middle) / len(text)]
    assert abs(sum(places) / len(places) - 0.5) < 0.02  # both together are uniform over the text
    assert sum(place < 0.1 for place in places) > 250 and sum(place > 0.9 for place in places) > 250
    short = {(len(parts[0]), len(parts[1])) for seed in range(400) for parts in [split_fim("ab", seed, 1.0, 0.5)[1]]}
    assert short == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)}  # every pair of places, the ends included


def test_the_decision_is_a_pure_function_of_seed_and_text():
    # Written down once: it must not change with Python's hash seed, the platform or a new release.
    assert split_fim("def f(x):\n    return x\n", 0, 1.0, 0.5) == ("psm", ["def f", ":\n    return x\n", "(x)"])
    assert [split_fim(text, 5, 0.5, 0.5) for text in TEXTS[:50]] == [
        split_fim(text, 5, 0.5, 0.5) for text in TEXTS[49::-1]
    ][::-1]


MARKS = ["<s>", "<s><t>", "<t>x", "abab"]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([*MARKS, "x", "ab", "<", "\n"]), min_size=1, max_size=30), st.integers(0, 50))
def test_no_cut_falls_inside_a_mark(pieces, seed):
    text = "".join(pieces)
    _, (prefix, suffix, middle) = split_fim(text, seed, 1.0, 0.5, MARKS)
    assert prefix + middle + suffix == text
    for cut in (len(prefix), len(prefix + middle)):
        for mark in MARKS:
            for start in range(max(0, cut - len(mark) + 1), cut):
                assert not text.startswith(mark, start), (text, cut, mark)


def test_a_cut_moves_to_the_nearer_edge_of_a_mark():
    mark = "<｜end▁of▁sentence｜>"
    moved = 0
    for seed in range(200):
        _, (prefix, _, middle) = split_fim(f"ab{mark}cd", seed, 1.0, 0.5, [mark])
        _, (plain, _, inner) = split_fim(f"ab{mark}cd", seed, 1.0, 0.5)
        for cut, free in ((len(prefix), len(plain)), (len(prefix + middle), len(plain + inner))):
            left, right = 2, 2 + len(mark)
            expected = free if not left < free < right else left if free - left <= right - free else right
            assert cut == expected
            moved += cut != free
    assert moved > 100


def test_empty_documents_and_those_with_a_sentinel_stay_as_they_are():
    assert split_fim("", 0, 1.0, 0.5) is None
    assert all(split_fim(f"a{token}b", seed, 1.0, 0.5) is None for token in FIM_TOKENS for seed in range(20))


def test_half_a_character_is_no_error():
    kind, parts = split_fim("a\ud800b", 0, 1.0, 0.0)
    assert kind == "psm" and sorted("".join(parts)) == sorted("a\ud800b")


def test_the_two_orders():
    assert fim_parts("psm", "P", "S", "M") == [
        (True, BEGIN), (False, "P"), (True, HOLE), (False, "S"), (True, END), (False, "M")
    ]  # fmt: skip
    assert fim_parts("spm", "P", "S", "M") == [(True, BEGIN), (True, HOLE), (False, "S"), (True, END), (False, "PM")]
    with pytest.raises(ValueError):
        fim_parts("mps", "P", "S", "M")


# --------------------------------------------------------------------------------------- repository order


def before(files: dict[str, str], *pairs: tuple[str, str]) -> None:
    """Each pair's files are in one group, the first of them earlier."""
    groups = order_files(files)
    assert sorted(path for group in groups for path in group) == sorted(files)
    for first, second in pairs:
        group = next(group for group in groups if first in group)
        assert second in group, (first, second, groups)
        assert group.index(first) < group.index(second), (first, second, group)


def apart(files: dict[str, str], one: str, other: str) -> None:
    assert not any(one in group and other in group for group in order_files(files)), order_files(files)


def test_python_imports_are_read_in_every_form():
    text = (
        "import os.path as p, b.c\nimport z; x = 1\nfrom .x import (\n    y,  # one\n    w as v,\n)\n"
        "from .. import up\nfrom ... import out\nfrom a.b import \\\n    c, d\nfrom .star import *\n"
        "    from late import f\n>>> import doc\n"
    )
    assert imports(PurePosixPath("pkg/sub/m.py"), text) == {
        "os/path", "b/c", "z", "/pkg/sub/x/y", "/pkg/sub/x/w", "/pkg/up", "/out", "a/b/c", "a/b/d", "/pkg/sub/star",
        "late/f",
    }  # fmt: skip
    assert imports(PurePosixPath("m.py"), "from ..x import y\nfrom . import z\n") == {"/z"}
    assert imports(PurePosixPath("README.md"), "import os\n") == set()


def test_python_order():
    files = {
        "src/app/__init__.py": "from .main import run\n",
        "src/app/main.py": "import json\nfrom . import util\nfrom app.models.user import U\nfrom .a import (\n f,\n)\n",
        "src/app/util.py": "import os\n",
        "src/app/a.py": "from .util import helper\n",
        "src/app/json.py": "",
        "src/app/models/__init__.py": "",
        "src/app/models/user.py": "from ..util import helper\n",
        "tests/test_app.py": "from app import run\n",
        "setup.py": "import setuptools\n",
    }
    before(
        files,
        ("src/app/util.py", "src/app/a.py"),
        ("src/app/a.py", "src/app/main.py"),
        ("src/app/models/user.py", "src/app/main.py"),
        ("src/app/util.py", "src/app/models/user.py"),
        ("src/app/main.py", "src/app/__init__.py"),
        ("src/app/__init__.py", "tests/test_app.py"),
    )
    apart(files, "src/app/main.py", "src/app/json.py")  # `import json` in a package is the library's
    apart(files, "setup.py", "src/app/main.py")


def test_of_several_files_of_one_name_the_nearest_is_meant():
    files = {f"{folder}/util.h": "" for folder in ("a", "b/c", "b/d", "e")}
    files["b/c/main.c"] = '#include "util.h"\n'
    files["e/x/y.c"] = '#include "util.h"\n'
    assert order_files(files) == [["a/util.h"], ["b/c/util.h", "b/c/main.c"], ["b/d/util.h"], ["e/util.h", "e/x/y.c"]]


def test_c_order():
    files = {
        "include/lib/a.h": "#ifndef A\n#include <stdio.h>\n#endif\n",
        "include/lib/b.h": '#include "a.h"\n',
        "src/b.c": "#include <lib/b.h>\n",
        "src/main.cpp": '#  include "../include/lib/a.h"\n#include <string.h>\n',
        "src/string.h": "",
        "src/k.cu": '#include "lib/b.h"\n',
        "src/n.m": '#import "lib/b.h"\n',
    }
    before(
        files,
        ("include/lib/a.h", "include/lib/b.h"),
        ("include/lib/b.h", "src/b.c"),
        ("include/lib/a.h", "src/main.cpp"),
        ("include/lib/b.h", "src/k.cu"),
        ("include/lib/b.h", "src/n.m"),
    )
    apart(files, "src/string.h", "src/main.cpp")


def test_java_kotlin_and_scala_order():
    root = "src/main/java/org/acme"
    files = {
        f"{root}/Shape.java": "package org.acme;\n",
        f"{root}/Circle.java": "package org.acme;\nimport java.util.List;\nimport org.acme.Shape;\n",
        f"{root}/App.java": "import static org.acme.Circle.area;\nimport org.acme.Shape.Inner;\n",
        f"{root}/Use.kt": "import org.acme.Circle as C\n",
        f"{root}/Main.scala": "import org.acme.{App, Shape => S}\n",
    }
    before(
        files,
        (f"{root}/Shape.java", f"{root}/Circle.java"),
        (f"{root}/Circle.java", f"{root}/App.java"),
        (f"{root}/Circle.java", f"{root}/Use.kt"),
        (f"{root}/App.java", f"{root}/Main.scala"),
    )


def test_javascript_and_typescript_order():
    files = {
        "src/a.ts": "export const a = 1;\n",
        "src/a.test.ts": "import { a } from './a';\n",
        "src/lib/index.ts": "export * from '../a.js';\n",
        "src/View.vue": "<script>\nimport lib from '@/lib';\n</script>\n",
        "src/main.js": "import {\n  x,\n} from './lib'\nconst v = await import('./View.vue');\nimport R from 'react'\n",
        "src/old.cjs": 'const main = require("./main");\n',
        "src/react.js": "",
    }
    before(
        files,
        ("src/a.ts", "src/a.test.ts"),
        ("src/a.ts", "src/lib/index.ts"),
        ("src/lib/index.ts", "src/View.vue"),
        ("src/View.vue", "src/main.js"),
        ("src/main.js", "src/old.cjs"),
    )
    apart(files, "src/react.js", "src/main.js")


@pytest.mark.parametrize("module", [{"go.mod": "module example.com/me/tool\n\ngo 1.22\n"}, {}])
def test_go_order(module):
    files = module | {
        "cmd/main.go": 'package main\n\nimport (\n\t"fmt" // (see it)\n\n\tu "example.com/me/tool/internal/util"\n)\n',
        "internal/util/util.go": 'package util\n\nimport "example.com/me/tool/base"\n',
        "internal/util/more.go": "package util\n",
        "internal/util/util_test.go": 'package util_test\n\nimport "example.com/me/tool/cmd"\n',
        "base/base.go": 'package base\n\nimport "errors"\n',
        "errors/errors.go": "package errors\n",
    }
    before(
        files,
        ("internal/util/util.go", "cmd/main.go"),
        ("internal/util/more.go", "cmd/main.go"),
        ("base/base.go", "internal/util/util.go"),
        ("cmd/main.go", "internal/util/util_test.go"),
    )
    apart(files, "errors/errors.go", "base/base.go")


def test_csharp_order():
    files = {
        "A/Base.cs": "using System;\nnamespace Acme.Core;\npublic class Base {}\n",
        "A/Other.cs": "namespace Acme.Core\n{\n}\n",
        "Z.cs": "namespace Acme\n{\n  using static Acme.Core.Base;\n}\n",
        "B/App.cs": "global using Acme.Core;\nusing B = Acme.Z;\nnamespace App;\nusing (var x = y) {}\n",
    }
    before(files, ("A/Base.cs", "Z.cs"), ("A/Other.cs", "B/App.cs"), ("Z.cs", "B/App.cs"))
    assert order_files(files | {"0.cs": ""})[0] == ["0.cs"]  # groups come in the order of their first paths


def test_rust_order():
    files = {
        "src/main.rs": "mod net;\nmod util;\nuse crate::util::log;\n",
        "src/util.rs": "pub fn log() {}\n\nmod tests {\n    use super::*;\n}\n",
        "src/net/mod.rs": "pub mod tcp;\nuse crate::{util::{self, log as l}, net::tcp::Conn};\n",
        "src/net/tcp.rs": "use super::addr::Addr;\n",
        "src/net/addr.rs": "use std::fmt;\n",
    }
    before(
        files,
        ("src/util.rs", "src/net/mod.rs"),
        ("src/net/addr.rs", "src/net/tcp.rs"),
        ("src/net/tcp.rs", "src/net/mod.rs"),
        ("src/net/mod.rs", "src/main.rs"),
    )


def test_php_order():
    files = {
        "src/Models/User.php": "<?php\nnamespace App\\Models;\n",
        "src/Http/Home.php": "<?php\nuse App\\Models\\{User, Post as P};\nclass Home { use Trait; }\n",
        "src/Models/Post.php": "<?php\nuse App\\Models\\User;\n",
        "public/index.php": "<?php\nrequire_once __DIR__ . '/../src/Http/Home.php';\ninclude('config.php');\n",
        "public/config.php": "<?php\n",
    }
    before(
        files,
        ("src/Models/User.php", "src/Models/Post.php"),
        ("src/Models/Post.php", "src/Http/Home.php"),
        ("src/Http/Home.php", "public/index.php"),
        ("public/config.php", "public/index.php"),
    )


def test_ruby_order():
    files = {
        "lib/tool.rb": "require 'tool/version'\nrequire_relative 'tool/cli'\nrequire 'json'\n",
        "lib/tool/version.rb": "",
        "lib/tool/cli.rb": 'require "tool/version"\n',
        "spec/tool_spec.rb": "require 'tool'\n",
        "app/json.rb": "",
    }
    before(
        files,
        ("lib/tool/version.rb", "lib/tool/cli.rb"),
        ("lib/tool/cli.rb", "lib/tool.rb"),
        ("lib/tool.rb", "spec/tool_spec.rb"),
    )
    apart(files, "app/json.rb", "lib/tool.rb")


def test_a_ring_begins_with_the_file_that_lacks_least_and_its_users_come_after_it():
    files = {
        "a_user.py": "import x\n",  # first by path, not in the ring
        "x.py": "import y, z\n",
        "y.py": "import x\n",
        "z.py": "import x, base\n",
        "base.py": "",
    }
    # x lacks two, y one, z one (base is there already): y, then x still lacks z, z still lacks x; by path x.
    assert order_files(files) == [["base.py", "y.py", "x.py", "z.py", "a_user.py"]]
    assert order_files({"self.py": "import self\n"}) == [["self.py"]]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=40), st.randoms(use_true_random=False))
def test_any_graph_is_ordered_whole_and_always_alike(edges, shuffler):
    names = [f"m{i:02}" for i in range(15)]
    files = {f"{name}.py": "".join(f"import m{b:02}\n" for a, b in edges if a == i) for i, name in enumerate(names)}
    groups = order_files(files)
    shuffled = list(files.items())
    shuffler.shuffle(shuffled)
    assert order_files(dict(shuffled)) == groups
    assert sorted(path for group in groups for path in group) == sorted(files)
    reach = [{b for a, b in edges if a == i} for i in range(15)]
    for _ in range(15):
        reach = [r | {far for near in r for far in reach[near]} for r in reach]
    where = {path: (g, at) for g, group in enumerate(groups) for at, path in enumerate(group)}
    for a, b in edges:
        (group_a, at_a), (group_b, at_b) = where[f"m{a:02}.py"], where[f"m{b:02}.py"]
        assert group_a == group_b
        assert at_b < at_a or a in reach[b]  # only in a ring may a file come before what it imports


def stdlib(*packages: str) -> dict[str, str]:
    paths = sorted(path for package in packages for path in (STDLIB / package).rglob("*.py"))
    return {path.relative_to(STDLIB).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_packages_of_the_standard_library():
    before(
        stdlib("json"),
        ("json/scanner.py", "json/decoder.py"),
        ("json/decoder.py", "json/__init__.py"),
        ("json/encoder.py", "json/__init__.py"),
        ("json/__init__.py", "json/tool.py"),
    )
    before(
        stdlib("asyncio"),
        ("asyncio/constants.py", "asyncio/sslproto.py"),
        ("asyncio/exceptions.py", "asyncio/streams.py"),
        ("asyncio/events.py", "asyncio/base_events.py"),
        ("asyncio/base_events.py", "asyncio/selector_events.py"),
        ("asyncio/selector_events.py", "asyncio/unix_events.py"),
        ("asyncio/unix_events.py", "asyncio/__init__.py"),
        ("asyncio/__init__.py", "asyncio/__main__.py"),
    )
    before(
        stdlib("email"),
        ("email/errors.py", "email/feedparser.py"),
        ("email/feedparser.py", "email/parser.py"),
        ("email/base64mime.py", "email/charset.py"),
        ("email/charset.py", "email/header.py"),
        ("email/message.py", "email/mime/base.py"),
        ("email/mime/base.py", "email/mime/nonmultipart.py"),
        ("email/mime/nonmultipart.py", "email/mime/text.py"),
    )


def test_thousands_of_files_are_ordered():
    """Quadratic work would take minutes."""
    draw = random.Random(0)
    files = {
        f"p{i % 40}/m{i}.py": "".join(f"from p{j % 40} import m{j}\n" for j in draw.sample(range(4000), 8))
        for i in range(4000)
    }
    files |= {f"N/f{i}.cs": f"using N{i % 3};\nusing N{(i + 1) % 3};\nnamespace N{i % 3};\n" for i in range(2000)}
    files |= {f"d{i}/util.h": '#include "util.h"\n' for i in range(2000)}
    files |= {f"d{i}/x.c": '#include "util.h"\n' for i in range(2000)}
    groups = order_files(files)
    assert sum(map(len, groups)) == 10_000 and len(groups) == 2 + 2000


def test_deep_chains_and_nested_brackets_end():
    chain = {f"m{i}.py": f"import m{i + 1}\n" for i in range(5000)}
    assert order_files(chain) == [[f"m{i}.py" for i in range(4999, -1, -1)]]
    for ending in ("rs", "scala", "php", "py", "go", "js"):
        imports(
            PurePosixPath(f"src/a.{ending}"), "use crate::" + "a{" * 2000 + ";\nimport (" + "{a," * 5000 + "\n" * 5000
        )


@pytest.mark.parametrize(
    ("path", "comment"),
    [
        ("src/a.py", "# src/a.py\n"),
        ("a.c", "// a.c\n"),
        ("q.sql", "-- q.sql\n"),
        ("a.html", "<!-- a.html -->\n"),
        ("a.css", "/* a.css */\n"),
        ("Makefile", "# Makefile\n"),
        ("x.y/readme", "# x.y/readme\n"),
        ("A.JAVA", "// A.JAVA\n"),
        ("a\nb.py", "# a b.py\n"),
    ],
)
def test_the_path_is_a_comment_of_the_language(path, comment):
    assert path_comment(path) == comment


def test_a_repository_gives_one_document_per_group():
    files = {"b.py": "x = 1", "a.py": "import b\n", "c.py": "y = 2\n", "e/__init__.py": "\n", "z.h": ""}
    assert list(repository_documents(files)) == ["# b.py\nx = 1\n# a.py\nimport b\n", "# c.py\ny = 2\n"]
    assert list(repository_documents({})) == []


# ------------------------------------------------------------------------------------------------ filters


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a/b_pb2.py", "x = 1\n"),
        ("api.pb.go", "package api\n"),
        ("jquery.min.js", "x\n"),
        ("web/package-lock.json", '{"name": "web"}\n'),
        ("Cargo.lock", "version\n"),
        ("go.sum", "a\n"),
        ("a.go", "// Copyright\n\n// Code generated by stringer; DO NOT EDIT.\n\npackage a\n"),
        ("a.py", "# -*- coding: utf-8 -*-\n# Generated by Django 4.2.1 on 2024-01-01\nimport x\n"),
        ("a.py", '"""Tokens."""\n# Auto-generated by Tools/scripts/generate_token.py\n'),
        ("a.py", "#\n# Autogenerated by Thrift Compiler (0.13.0)\n#\n# DO NOT EDIT UNLESS YOU ARE SURE\n"),
        ("a.py", "# generated by datamodel-codegen:\n#   filename: x.json\nimport x\n"),
        ("a.js", "/**\n * @generated SignedSource<<0123>>\n */\nlet x;\n"),
        ("a.c", "/*\n   This file was automatically generated by SWIG\n*/\nint x;\n"),
        ("a.cs", "//------\n// <auto-generated>\n//     This code was generated by a tool.\n// </auto-generated>\n"),
        ("a.rs", "// This file is @generated by prost-build.\n"),
        ("a.xml", "<a>\n<!-- Do not edit this file: it is made from a.in -->\n</a>\n"),
        ("a.unknown", "; Please do not edit by hand.\nx\n"),
        ("a.json", '{"text": "' + "word " * 250 + '"}\n'),
        ("a.js", "var words = here;" * 7 + "\n"),
        ("data.txt", "12.5 13.5 14.5 15.5\n" * 20),
    ],
)  # fmt: skip
def test_generated_files_are_found(path, text):
    assert is_generated(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", ""),
        ("a.py", '"""The tree generated by the parser.\n\nGenerated by Foo; do not edit.\n"""\nimport x\n'),
        ("a.py", 'MARK = "# @generated"\nHEADER = "Code generated by x. DO NOT EDIT."\n'),
        ("a.py", "# Events that are generated by the parser, and what reads them.\nimport x\n"),
        ("a.py", "# Keys are auto-generated when they are missing.\nimport x\n"),
        ("a.py", "# Mappings of names,\n# generated with Python 2, loadable by Python 3.\nimport x\n"),
        ("a.py", "import x\n# Generated with Hypothesis and kept since.\n"),
        ("a.py", "import x\n" * 25 + "# Code generated by x. DO NOT EDIT.\n"),
        ("a.md", "# Generated by hand\n\nA generated file says: do not edit.\n"),
        ("a.md", "# Code generated by our tool\n" + "word " * 300 + "\n"),
        ("a.c", "/* A lexer. */\nint x; /* generated\n by hand */\nauto this_file_is_generated;\n"),
        ("lock.json", '{"a": "word"}\n'),
        ("min.js", "let x;\n"),
        ("a.js", "x" * 1000 + "\n" + "let words;\n" * 30),
    ],
)
def test_written_files_are_left_alone(path, text):
    assert is_generated(path, text) is None


def test_the_reason_tells_where_or_how_much():
    assert is_generated("a.py", "\n# @generated\n") == "line 2 says '@generated'"
    assert is_generated("a.py", "x" * 1001 + "\nlet words" * 30) == "a line of 1,001 characters (more than 1,000)"
    assert is_generated("a.js", ("y" * 101 + "\n") * 5) and not is_generated("a.js", ("y" * 100 + "\n") * 5)
    assert is_generated("a.py", "a..." * 25) is None and "24 %" in is_generated("a.py", "a..." * 24 + "....")


def test_this_package_was_written_by_people():
    for path in (ROOT / "deepseek_ft").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 1:  # the mean of a single long line is that line
            assert is_generated(path.name, text) is None, path


# ----------------------------------------------------------------------------------------------- licences

MIT = """MIT License

Copyright (c) 2024 A. Person

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.
"""
BSD = """Redistribution and use in source and binary forms, with or without
# modification, are permitted provided that the following conditions are met:
# 1. Redistributions of source code must retain the above copyright notice
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (MIT, "MIT"),
        (MIT + "\nThe Software shall be used for Good, not Evil.\n", "JSON"),
        ("“Commons Clause” License Condition\n" + MIT, None),
        (BSD, "BSD-2-Clause"),
        (BSD + "# 3. Neither the name of the copyright holder nor", "BSD-3-Clause"),
        (BSD + "All advertising materials mentioning features", "BSD-4-Clause"),
        ("    Apache License\n    Version 2.0, January 2004\n", "Apache-2.0"),
        (" * Licensed under the Apache License, Version 2.0 (the\n", "Apache-2.0"),
        ("Mozilla Public License Version 2.0\n=====\n... GNU General Public License, Version 2.0", "MPL-2.0"),
        ("GNU GENERAL PUBLIC LICENSE\n   Version 2, June 1991\n", "GPL-2.0"),
        ("GNU GENERAL PUBLIC LICENSE\n   Version 3, 29 June 2007\n... version 3 of the GNU Affero", "GPL-3.0"),
        ("GNU LESSER GENERAL PUBLIC LICENSE\n  Version 2.1, February 1999", "LGPL-2.1"),
        ("GNU LESSER GENERAL PUBLIC LICENSE\n  Version 3, 29 June 2007\n the GNU General Public License", "LGPL-3.0"),
        ("GNU AFFERO GENERAL PUBLIC LICENSE\n  Version 3, 19 November 2007", "AGPL-3.0"),
        ("# under the terms of the GNU General Public License as published by\n# the Free Software Foundation, either "
         "version 3 of the License", "GPL-3.0"),
        ("Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is "
         "hereby granted, provided that the above copyright notice and this permission notice appear in all copies.",
         "ISC"),
        ("This is free and unencumbered software released into the public domain.", "Unlicense"),
        ("CC0 1.0 Universal", "CC0-1.0"),
        ("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2\n", "PSF-2.0"),
        ("// SPDX-License-Identifier: GPL-2.0-only\nint x;", "GPL-2.0"),
        ("/* SPDX-License-Identifier: (GPL-2.0+ OR MIT) */", "MIT"),
        ("<!-- SPDX-License-Identifier: MIT AND GPL-3.0-or-later -->", "GPL-3.0"),
        ("# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception\n", "Apache-2.0"),
        ("All rights reserved. You may not copy this.", None),
        ("This tool tells MIT from Apache and from the GNU General Public License.", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_licence_is_known_by_its_words(text, name):
    assert license_of(text) == name


def test_real_licences():
    assert repository_license(ROOT) == "Apache-2.0"
    if (STDLIB / "LICENSE.txt").is_file():
        assert license_of((STDLIB / "LICENSE.txt").read_text(encoding="utf-8")) == "PSF-2.0"


def test_permissive_licences_ask_for_no_more_than_a_notice():
    assert {"MIT", "Apache-2.0", "BSD-3-Clause", "ISC"} <= PERMISSIVE
    assert not any(name.startswith(("GPL", "LGPL", "AGPL", "MPL", "CC-BY", "BUSL")) for name in PERMISSIVE)


def test_the_licence_of_a_folder(tmp_path):
    assert repository_license(tmp_path) is None
    (tmp_path / "license.go").write_text("package license\n")
    (tmp_path / "LICENSES").mkdir()
    assert repository_license(tmp_path) is None
    (tmp_path / "Licence.md").write_text(MIT)
    assert repository_license(tmp_path) == "MIT"
    (tmp_path / "LICENSE-third-party.txt").write_text("Various.")
    assert repository_license(tmp_path) == "MIT"
    (tmp_path / "COPYING.LESSER").write_text("GNU LESSER GENERAL PUBLIC LICENSE\nVersion 3, 29 June 2007")
    assert repository_license(tmp_path) == "LGPL-3.0"
    (tmp_path / "COPYING").write_text("Nobody may do anything.")
    assert repository_license(tmp_path) is None


# --------------------------------------------------------------------------------------------- .gitignore

IGNORES = {
    ".gitignore": "# comment\n*.log\n!keep.log\n/build/\nfoo/*\n!foo/a\n*.d\n!x.d\nlogs/**\n!logs/keep\ndocs/**/tmp\n"
    "trail \\ \nspace   \n\\#hash\n\\!bang\n[ab]?.c\n*/only\ndir/\nwin.txt\r\nbroken\\\n**/deep/**/end\n[\nanchor/ed\n",
    "sub/.gitignore": "!*.log\nkeep.log\n/local\n*.tmp\nmore/**/\n",
    "sub/in/.gitignore": "!special.tmp\n!../x\n",
    "build/.gitignore": "!*\n",
    "star/.gitignore": "*\n!*/\n!*.py\n",
    "bom/.gitignore": "\ufeff*.bom\n",
}
PATHS = """
a.log keep.log sub/a.log sub/keep.log sub/in/keep.log build/x build/y.log x/build/y foo/a foo/b foo/a/b foo/c/d x/foo/b
q.d x.d/y x.d/y.d x.d/sub.d/z p/x.d logs/one logs/keep logs/sub/x x/logs/one docs/tmp docs/a/b/tmp docs/a/tmp/x space
#hash !bang a1.c ab.c b.c c1.c z/b1.c only x/only x/y/only dir/f x/dir/f e/dir win.txt broken deep/end deep/a/b/end
u/deep/end/x anchor/ed x/anchor/ed sub/local sub/in/local sub/a.tmp sub/in/a.tmp sub/in/special.tmp sub/more/f
sub/more/g/h star/a.py star/a.txt star/b/c.py star/b/c.txt bom/a.bom bom/b x.log/f keep.log.d/f
""".split() + ["trail  ", "sub/sp ace.log"]  # fmt: skip


def git(folder, *words: str, **more) -> subprocess.CompletedProcess:
    environment = clean_environment(GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_SYSTEM="/dev/null", HOME=str(folder))
    return subprocess.run(["git", *words], cwd=folder, env=environment, capture_output=True, check=False, **more)


@pytest.fixture
def tree(tmp_path):
    """A folder with .gitignore files; the files to ask about need not be there, for git neither."""
    folder = tmp_path / "tree"
    for name, text in IGNORES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git to compare with")
def test_gitignore_is_read_as_git_reads_it(tree):
    git(tree, "init", "-q")
    answer = git(tree, "check-ignore", "--no-index", "-z", "--stdin", input="\0".join(PATHS).encode())
    expected = set(answer.stdout.decode().split("\0")) - {""}
    is_ignored = ignored_by_git(tree)
    assert {path for path in PATHS if is_ignored(path)} == expected, answer.stderr
    assert 20 < len(expected) < len(PATHS) - 20


def test_negation_and_nesting(tree):
    is_ignored = ignored_by_git(tree)
    assert is_ignored("a.log") and not is_ignored("keep.log")
    assert not is_ignored("sub/a.log") and is_ignored("sub/keep.log")  # the nearer file decides
    assert is_ignored("build/y.log")  # an excluded folder cannot take anything back in
    assert is_ignored("sub/a.tmp") and not is_ignored("sub/in/special.tmp")
    assert not is_ignored("q.d.e/f") and is_ignored("x.d/y.d")


def test_folders_above_count_up_to_the_one_with_git(tree):
    (tree.parent / ".gitignore").write_text("*\n")
    assert not ignored_by_git(tree)("foo/a")  # no .git anywhere above: only the folder's own files
    (tree / ".git").mkdir()
    below = ignored_by_git(tree / "sub" / "in")
    assert below("keep.log") and below("a.tmp") and not below("special.tmp") and not below("x.log")
    assert not ignored_by_git(tree / "build")("x")  # whoever names a folder wants it
    assert ignored_by_git(tree / "logs" / "sub")("x")  # but a pattern for its files still holds


def test_a_gitignore_is_read_once_and_only_when_asked(tree):
    is_ignored = ignored_by_git(tree)
    (tree / "sub" / ".gitignore").write_text("a.log\n")
    assert is_ignored("sub/a.log")
    (tree / "sub" / ".gitignore").unlink()
    assert is_ignored("sub/a.log")
