"""Source code as training data: fill-in-the-middle, files in the order of their imports, and what to leave out.

Everything is a pure function of texts and paths, except the two that read a folder's licence and .gitignore files.
Paths of a repository are relative and have forward slashes.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import ConfigError, DataError

# ------------------------------------------------------------------------------------- fill in the middle

# The same names in every DeepSeek vocabulary, not the same ids (Coder v1: 32016, 32015, 32017; V3: 128801, 128800,
# 128802).
FIM_TOKENS = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")


@dataclass(frozen=True)
class FimIds:
    """Ids of FIM_TOKENS in one vocabulary."""

    begin: int
    hole: int
    end: int


def fim_ids(vocabulary: Mapping[str, int]) -> FimIds:
    """Token -> id of a tokenizer, added tokens included -> the ids of the three sentinels; ConfigError without them."""
    missing = [token for token in FIM_TOKENS if token not in vocabulary]
    if missing:
        raise ConfigError(
            f"fill-in-the-middle needs tokens that this tokenizer's vocabulary ({len(vocabulary):,} entries) lacks: "
            f"{', '.join(missing)}. Take a tokenizer that has them (DeepSeek-Coder, V2, V3), or train without: "
            "data.code.fim_rate=0"
        )
    return FimIds(*(vocabulary[token] for token in FIM_TOKENS))


def split_fim(
    text: str, seed: int, rate: float, spm_rate: float, marks: Sequence[str] = ()
) -> tuple[str, list[str]] | None:
    """How a document becomes a fill-in-the-middle example: ("psm" or "spm", [prefix, suffix, middle]); None: it stays.

    A share `rate` of all documents is cut, `spm_rate` of those for SPM, the others for PSM (Bavarian et al.,
    arXiv:2207.14255 §3; `fim_parts` has the orders). Both cuts are uniform over the len(text) + 1 places between
    characters, so any part may be empty, and prefix + middle + suffix is the text. A cut inside one of `marks` (special
    tokens, which must stay whole) moves to that mark's nearer edge. All is decided by a hash of seed and text: neither
    the order of documents nor the number of processes matters, and a higher rate keeps the cuts of a lower one. An
    empty document stays as it is, and so does one that has a sentinel written in it: its reader could not tell which
    one is ours.
    """
    if not text or any(token in text for token in FIM_TOKENS):
        return None
    data = f"{seed}\n".encode() + text.encode("utf-8", "surrogatepass")
    # The tag keeps these draws apart from any other hash of the same text, such as the one that picks validation data.
    digest = hashlib.blake2b(data, digest_size=32, person=b"fim").digest()
    whether, which, *where = (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8))
    if whether >= rate * 2**64:
        return None
    spans = _mark_spans(text, marks)
    first, second = sorted(_outside(place * (len(text) + 1) >> 64, spans) for place in where)
    kind = "spm" if which < spm_rate * 2**64 else "psm"
    return kind, [text[:first], text[second:], text[first:second]]


def _mark_spans(text: str, marks: Sequence[str]) -> list[tuple[int, int]]:
    """[start, end) of every mark in the text, in order; marks that overlap become one span."""
    starts = [
        (place.start(), len(mark))
        for mark in marks
        if mark and mark in text
        for place in re.finditer(f"(?={re.escape(mark)})", text)
    ]
    spans: list[tuple[int, int]] = []
    for start, length in sorted(starts):
        if spans and start < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], start + length))
        else:
            spans.append((start, start + length))
    return spans


def _outside(cut: int, spans: list[tuple[int, int]]) -> int:
    at = bisect.bisect_left(spans, (cut, 0)) - 1  # the last span that starts before the cut
    if at < 0 or cut >= spans[at][1]:
        return cut
    start, end = spans[at]
    return start if cut - start <= end - cut else end


def fim_parts(kind: str, prefix: str, suffix: str, middle: str) -> list[tuple[bool, str]]:
    """The example in reading order, as (is a sentinel, its token or a piece of text).

        psm   begin prefix hole suffix end middle
        spm   begin hole suffix end prefix+middle

    PSM is DeepSeek-Coder's own (arXiv:2401.14196 §3.1.2). SPM is the variant of Bavarian et al. (arXiv:2207.14255) that
    shares PSM's sentinels: it reads like PSM with an empty prefix, whose middle begins with what comes before the hole.
    The caller encodes each piece of text by itself (prefix+middle is one piece), puts the sentinels' ids between them
    and adds the end of the document. A piece may be empty.
    """
    begin, hole, end = ((True, token) for token in FIM_TOKENS)
    if kind == "psm":
        return [begin, (False, prefix), hole, (False, suffix), end, (False, middle)]
    if kind == "spm":
        return [begin, hole, (False, suffix), end, (False, prefix + middle)]
    raise ValueError(f"kind is 'psm' or 'spm', not {kind!r}")


# ------------------------------------------------------------------------------------------------ imports

_LANGUAGES = {
    ending: language
    for language, endings in {
        "python": "py pyi pyx pxd",
        "c": "c h cc cpp cxx hpp hh hxx inl ipp cu cuh m mm",
        "jvm": "java kt kts scala groovy",
        "js": "js jsx mjs cjs ts tsx mts cts vue svelte",
        "go": "go",
        "c#": "cs",
        "rust": "rs",
        "php": "php",
        "ruby": "rb",
    }.items()
    for ending in endings.split()
}


def imports(path: PurePosixPath, text: str) -> set[str]:
    """What a file asks for, as names in which "/" separates the parts; empty for a language that is not known here.

    "/a/b" counts from the root of the repository, "a/b" is the end of some path (the file may lie below src/, include/
    ...). The last parts may name a thing inside the file (a function, a class). For Go and C# the name is a package's
    or a namespace's. Found by regular expressions, so that a file that does not compile has imports too; an import in
    a comment or a string counts when it stands where a real one could. Python (absolute and relative), C, C++,
    Objective-C, Java, Kotlin, Scala, JavaScript, TypeScript, Go, C#, Rust, PHP, Ruby.
    """
    language = _language(path.as_posix())
    return _READERS[language](path, text) if language else set()


def _language(path: str) -> str | None:
    return _LANGUAGES.get(_ending(path))


def _ending(path: str) -> str:
    """'py' for 'a/b.Py', '' for 'Makefile'."""
    return path.rpartition("/")[2].rpartition(".")[2].lower() if "." in path.rpartition("/")[2] else ""


def _from_here(folder: PurePosixPath | str, name: str) -> set[str]:
    """{"/a/b"} for a name relative to a folder of the repository; empty when it leads out of the repository."""
    joined = posixpath.normpath(posixpath.join(str(folder), name))
    if joined == ".." or joined.startswith(("../", "/")):
        return set()
    return {"/" if joined == "." else f"/{joined}"}


def _alternatives(text: str) -> list[str]:
    """'a::{b, c::{d, e}}' -> ['a::b', 'a::c::d', 'a::c::e']; brackets that do not close are closed at the end."""
    found, heads, here = [], [""], ""
    for piece in re.split(r"([{},])", text):
        if piece == "{":
            heads.append(heads[-1] + here)
            here = ""
        elif piece in (",", "}"):
            found.append(heads[-1] + here if here else "")
            here = ""
            if piece == "}" and len(heads) > 1:
                heads.pop()
        else:
            here += piece.strip()
    return [name for name in [*found, here and heads[-1] + here] if name]


# Lists in brackets are read up to 20,000 characters: a bracket that never closes must not cost the rest of the file.
_PYTHON_IMPORT = re.compile(r"^[ \t]*(?:import|cimport)[ \t]+([^\n;#]+)", re.M)
_PYTHON_FROM = re.compile(
    r"^[ \t]*from[ \t]*(\.*)[ \t]*([\w.]*)[ \t]+c?import\b[ \t]*(\([^)]{0,20000}\)|[^\n;#]+)", re.M
)


def _python_imports(path: PurePosixPath, text: str) -> set[str]:
    text = re.sub(r"\\\r?\n", " ", text)
    found = set()
    for match in _PYTHON_IMPORT.finditer(text):
        found |= {
            name.replace(".", "/") for item in match[1].split(",") for name in re.findall(r"^\s*(\w[\w.]*)", item)
        }
    for match in _PYTHON_FROM.finditer(text):
        dots, module, names = len(match[1]), match[2].replace(".", "/"), re.sub(r"#.*", "", match[3]).strip("()")
        base = posixpath.normpath("/".join([".", *[".."] * (dots - 1), module])) if dots else module
        # `from a import b` asks for the module a.b where there is one, and otherwise for a.
        targets = [f"{base}/{name}" for item in names.split(",") for name in re.findall(r"^\s*(\w+)", item)] or [base]
        for target in targets:
            found |= _from_here(path.parent, target) if dots else {target}
    return found - {""}


_C_INCLUDE = re.compile(r'^[ \t]*#[ \t]*(?:include|import)[ \t]*(?:"([^"\n]+)"|<([^>\n]+/[^>\n]+)>)', re.M)


def _c_imports(path: PurePosixPath, text: str) -> set[str]:
    found = set()
    for match in _C_INCLUDE.finditer(text):
        name = match[1] or match[2]  # <a/b.h> may be the library's own header, <string.h> is the system's
        found |= _from_here(path.parent, name) if name.startswith(".") else {posixpath.normpath(name)}
    return found


_JVM_IMPORT = re.compile(r"^[ \t]*import[ \t]+(?:static[ \t]+)?([\w.`]+(?:\{[^}]{0,20000}\})?)", re.M)


def _jvm_imports(path: PurePosixPath, text: str) -> set[str]:
    names = {name for match in _JVM_IMPORT.finditer(text) for name in _alternatives(match[1])}
    names = {re.split(r"\s*=>|\s", name)[0].replace("`", "") for name in names}
    return {name.strip("._").replace(".", "/") for name in names if name.strip("._")}


_JS_IMPORT = re.compile(r"""\b(?:from|import|require)\s*\(?\s*(['"`])(\.\.?(?:/[^'"`\n]*)?|[@~]/[^'"`\n]+)\1""")


def _js_imports(path: PurePosixPath, text: str) -> set[str]:
    found = set()
    for _, name in _JS_IMPORT.findall(text):
        # "@/" and "~/" are what bundlers call the source folder; a package's own name is not in the repository.
        found |= _from_here(path.parent, name) if name.startswith(".") else {posixpath.normpath("src/" + name[2:])}
    return found


_GO_IMPORT = re.compile(r'^import[ \t]*(?:\(([^)]{0,20000})\)|(?:[\w.]+[ \t]+)?"([^"\n]+)")', re.M)


def _go_imports(path: PurePosixPath, text: str) -> set[str]:
    found = set()
    for block, single in _GO_IMPORT.findall(re.sub(r"//.*", "", text)):
        found |= {single} if single else set(re.findall(r'"([^"\n]+)"', block))
    return found


_CSHARP_USING = re.compile(
    r"^[ \t]*(?:global[ \t]+)?using[ \t]+(static[ \t]+)?(\w+[ \t]*=[ \t]*)?([\w.]+)[ \t]*;", re.M
)
_CSHARP_NAMESPACE = re.compile(r"^[ \t]*namespace[ \t]+([\w.]+)", re.M)


def _csharp_imports(path: PurePosixPath, text: str) -> set[str]:
    found = set()
    for static, alias, name in _CSHARP_USING.findall(text):
        if static or alias:  # of a type: its namespace is what comes before the last dot
            found.add(name.rpartition(".")[0].replace(".", "/"))
        if not static:
            found.add(name.replace(".", "/"))
    return found - {""}


_RUST_MOD = re.compile(r"^[ \t]*(?:pub(?:\([^)\n]*\))?[ \t]+)?mod[ \t]+(\w+)[ \t]*;", re.M)
_RUST_USE = re.compile(r"^([ \t]*)(?:pub(?:\([^)\n]*\))?[ \t]+)?use[ \t]+((?:crate|self|super)::[^;]{1,20000});", re.M)


def _rust_imports(path: PurePosixPath, text: str) -> set[str]:
    here = path.parent if path.stem in ("mod", "lib", "main") else path.with_suffix("")
    folders = path.parent.parts
    crate = PurePosixPath(*folders[: len(folders) - folders[::-1].index("src")]) if "src" in folders else path.parent
    found = {name for module in _RUST_MOD.findall(text) for name in _from_here(here, module)}
    for indent, use in _RUST_USE.findall(text):
        for name in _alternatives(re.sub(r"//.*", "", use)):
            parts = re.split(r"\s+as\s+", name)[0].replace("*", "").strip(": ").split("::")
            if indent and parts[0] == "super":  # `mod tests { use super::*; }`: super is this very file
                continue
            base = crate if parts[0] == "crate" else here
            inside = [".." if part == "super" else part for part in parts if part not in ("crate", "self")]
            found |= _from_here(base, "/".join(inside))
    return found


_PHP_REQUIRE = re.compile(
    r"""\b(?:require|include)(?:_once)?\s*\(?\s*(__DIR__\s*\.\s*|dirname\(__FILE__\)\s*\.\s*)?(['"])([^'"\n]+)\2"""
)
_PHP_USE = re.compile(r"^use[ \t]+(?:function[ \t]+|const[ \t]+)?\\?(\w[\w\\]*(?:\{[^}]{0,20000}\})?)", re.M)


def _php_imports(path: PurePosixPath, text: str) -> set[str]:
    found = set()
    for here, _, name in _PHP_REQUIRE.findall(text):
        found |= _from_here(path.parent, name.lstrip("/"))
        if not here:  # relative to the script that was started, often at the root
            found |= _from_here("", name.lstrip("/"))
    for match in _PHP_USE.findall(text):
        found |= {re.split(r"\s+as\s+", name)[0].strip("\\").replace("\\", "/") for name in _alternatives(match)}
    return found


_RUBY_REQUIRE = re.compile(r"""^[ \t]*require(_relative)?[ \t]*\(?[ \t]*(['"])([^'"\n]+)\2""", re.M)


def _ruby_imports(path: PurePosixPath, text: str) -> set[str]:
    found = set()
    for relative, _, name in _RUBY_REQUIRE.findall(text):
        name = name.removesuffix(".rb")
        found |= _from_here(path.parent, name) if relative or name.startswith(".") else {name}
    return found


_READERS: dict[str, Callable[[PurePosixPath, str], set[str]]] = {
    "python": _python_imports,
    "c": _c_imports,
    "jvm": _jvm_imports,
    "js": _js_imports,
    "go": _go_imports,
    "c#": _csharp_imports,
    "rust": _rust_imports,
    "php": _php_imports,
    "ruby": _ruby_imports,
}


# --------------------------------------------------------------------------------------- repository order


def order_files(files: Mapping[str, str]) -> list[list[str]]:
    """Relative path -> text of one repository -> groups of paths, each file after the files that it imports.

    A group is what hangs together by imports (a connected component); a file without any is a group of its own. Files
    that import each other in a ring come in the order of DeepSeek-Coder (arXiv:2401.14196 §2.2, algorithm 1): the one
    with the fewest imports still to come first. That rule is kept to each ring, so that a file outside always follows
    what it imports. The same files give the same groups: ties go by path, and groups by their first path. Time grows
    with files plus imports.
    """
    needs = _dependencies(files)
    order = [node for ring in _rings(needs) for node in _unring(ring, needs)]
    group_of = _components(needs)
    groups: dict[str, list[str]] = {}
    for node in order:
        if node in files:
            groups.setdefault(group_of[node], []).append(node)
    return sorted(groups.values(), key=min)


def _dependencies(files: Mapping[str, str]) -> dict[str, list[str]]:
    """File -> the files it imports, sorted. A Go package or C# namespace is a node between its users and its files.

    Without that node a namespace of m files with n users would cost m * n edges.
    """
    index = _index(files)
    needs: dict[str, set[str]] = {path: set() for path in sorted(files)}
    for path in sorted(files):
        language = _language(path)
        for name in imports(PurePosixPath(path), files[path]):
            readings = [(language, reading) for reading in _readings(language, name)]
            key = next((reading for reading in readings if reading in index), None)
            if key is None:
                continue
            node = _nearest(index[key], path)
            if language in ("go", "c#"):
                if path in index[key]:  # its own package
                    continue
                node = f"\0{language} {key[1]}"  # no file's path begins with a null
                needs.setdefault(node, set()).update(index[key])
            if node != path:
                needs[path].add(node)
    return {node: sorted(targets) for node, targets in sorted(needs.items())}


def _index(files: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    """(language, name as `imports` gives it) -> files that answer to it, sorted by path."""
    modules = {}  # folder of a go.mod -> the module's import path
    for path, text in files.items():
        if posixpath.basename(path) == "go.mod" and (match := re.search(r"^module[ \t]+\"?([^\s\"]+)", text, re.M)):
            modules[posixpath.dirname(path)] = match[1]
    index = defaultdict(list)
    for path in sorted(files):
        language = _language(path)
        if language == "c#":
            for name in set(_CSHARP_NAMESPACE.findall(files[path])):
                index[language, name.replace(".", "/")].append(path)
        elif language == "go":
            if not path.endswith("_test.go"):
                index[language, _go_package(posixpath.dirname(path), modules)].append(path)
        elif language:
            for name in _names(language, path):
                index[language, "/" + name].append(path)
                parts = name.split("/")
                for start in range(len(parts)):
                    if _is_search_root(language, "/".join(parts[:start]), files):
                        index[language, "/".join(parts[start:])].append(path)
    return index


def _go_package(folder: str, modules: Mapping[str, str]) -> str:
    """Import path of a folder: that of the nearest go.mod above, and the folders between; "/folder" without one."""
    above = folder
    while above not in modules:
        if not above:
            return f"/{folder}"
        above = posixpath.dirname(above)
    return posixpath.normpath(f"{modules[above]}/{posixpath.relpath(folder or '.', above or '.')}")


def _names(language: str, path: str) -> list[str]:
    """The names of a file below the root of the repository; the path alone for C, where endings are written."""
    stem = path.rpartition(".")[0]
    folder, _, last = stem.rpartition("/")
    if language == "c":
        return [path]
    if language == "python":
        return [folder if last == "__init__" else stem]
    if language == "rust":
        return [folder if last in ("mod", "lib", "main") else stem]
    if language == "js":
        return [path, stem, *([folder] if last == "index" else [])]
    return [path, stem] if language == "php" else [stem]


def _is_search_root(language: str, folder: str, files: Mapping[str, str]) -> bool:
    """Whether a name without a leading slash may begin at this folder."""
    if language == "python":  # inside a package only relative imports reach a neighbour: `import json` is not ./json.py
        return (f"{folder}/__init__.py" if folder else "__init__.py") not in files
    if language == "ruby":
        return folder in ("", "lib") or folder.endswith("/lib")
    return language != "rust"


def _readings(language: str, name: str) -> Iterator[str]:
    """What a name may mean, the likeliest first: also a thing inside a module, x.js written for x.ts, and so on."""
    yield name
    parts = name.split("/")
    if language in ("python", "jvm", "rust"):
        least = 2 if name.startswith("/") else 1
        yield from ("/".join(parts[:length]) for length in range(len(parts) - 1, least - 1, -1))
    elif language == "js":
        yield re.sub(r"\.[cm]?jsx?$", "", name)
    elif language == "php" and parts[0]:  # the first parts of a namespace often stand for src/
        yield from ("/".join(parts[start:]) for start in range(1, len(parts) - 1))
    elif language == "go" and "." in parts[0]:  # host/owner/repository, for want of a go.mod
        yield "/" + "/".join(parts[3:])


def _nearest(found: Sequence[str], path: str) -> str:
    """Of sorted paths the first of those that share most folders with `path`."""
    at = bisect.bisect(found, path)  # those that share most stand where `path` would stand
    shared = [posixpath.commonprefix([path, other]) for other in found[max(at - 1, 0) : at + 1]]
    return found[bisect.bisect_left(found, max((text[: text.rfind("/") + 1] for text in shared), key=len))]


def _rings(needs: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """Strongly connected components, each after those it needs (Tarjan 1972, doi:10.1137/0201010; no recursion)."""
    number: dict[str, int] = {}  # node -> when it was first seen
    low: dict[str, int] = {}  # node -> the earliest node of its ring that is known so far
    waiting: list[str] = []  # nodes whose ring is not complete
    place: dict[str, int] = {}  # where they are in `waiting`
    for root in needs:
        walk = [] if root in number else [(root, iter(needs[root]))]
        while walk:
            node, rest = walk[-1]
            if node not in number:
                number[node] = low[node] = len(number)
                place[node] = len(waiting)
                waiting.append(node)
            for target in rest:
                if target not in number:
                    walk.append((target, iter(needs[target])))
                    break
                if target in place:
                    low[node] = min(low[node], number[target])
            else:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[node])
                if low[node] == number[node]:
                    ring = waiting[place[node] :]
                    del waiting[place[node] :]
                    for member in ring:
                        del place[member]
                    yield ring


def _unring(ring: list[str], needs: Mapping[str, list[str]]) -> list[str]:
    """The nodes of one ring: again and again the one with the fewest needs not yet met, then the first by path."""
    inside = set(ring)
    users = defaultdict(list)
    unmet = {}
    for node in ring:
        within = [target for target in needs[node] if target in inside]
        unmet[node] = len(within)
        for target in within:
            users[target].append(node)
    heap = [(count, node) for node, count in unmet.items()]
    heapq.heapify(heap)
    order = []
    while heap:
        count, node = heapq.heappop(heap)
        if unmet.get(node) != count:  # out of date, or already out
            continue
        del unmet[node]
        order.append(node)
        for user in users[node]:
            if user in unmet:
                unmet[user] -= 1
                heapq.heappush(heap, (unmet[user], user))
    return order


def _components(needs: Mapping[str, list[str]]) -> dict[str, str]:
    """Node -> the first node of its connected component, edges taken both ways."""
    neighbours = {node: list(targets) for node, targets in needs.items()}
    for node, targets in needs.items():
        for target in targets:
            neighbours[target].append(node)
    first: dict[str, str] = {}
    for root in needs:
        todo = [] if root in first else [root]
        while todo:
            node = todo.pop()
            if node not in first:
                first[node] = root
                todo += neighbours[node]
    return first


# -------------------------------------------------------------------------------------------- documents

_COMMENTS = {
    ending: style
    for style, endings in {
        ("#", ""): "py pyi pyx pxd rb sh bash zsh fish pl pm r jl yaml yml toml cfg conf cmake mk tcl nix ex exs cr "
        "nim coffee awk ps1 tf hcl gd graphql properties bzl txt",
        ("//", ""): "c h cc cpp cxx hpp hh hxx inl ipp cu cuh cs java kt kts scala groovy gradle js jsx mjs cjs ts tsx "
        "mts cts json jsonc go rs swift dart php proto thrift v sv svh zig m mm d glsl vert frag comp hlsl metal fs "
        "fsx fsi sol scss less pas mod",
        ("--", ""): "sql hs lua elm adb ads vhd vhdl agda purs lean idr",
        (";", ""): "lisp el clj cljs cljc edn scm rkt asm ini",
        ("%", ""): "tex sty bib erl hrl",
        ("!", ""): "f f90 f95 f03 f08",
        ("'", ""): "vb bas vbs",
        ('"', ""): "vim",
        ("REM", ""): "bat cmd",
        ("..", ""): "rst",
        ("/*", "*/"): "css",
        ("(*", "*)"): "ml mli sml",
        ("<!--", "-->"): "html htm xhtml xml xsl svg vue svelte md markdown astro xaml csproj",
    }.items()
    for ending in endings.split()
}  # fmt: skip


def path_comment(path: str) -> str:
    """The line that tells which file follows, a comment of the file's language: "# src/a.py\\n"; "#" when unknown."""
    opening, closing = _COMMENTS.get(_ending(path), ("#", ""))
    return " ".join([opening, *path.splitlines(), *([closing] if closing else [])]) + "\n"


def repository_documents(files: Mapping[str, str]) -> Iterator[str]:
    """One document per group of `order_files`: each file under a comment with its path (arXiv:2401.14196 §2.2).

    Every file ends with a line break. A group of nothing but empty files gives no document.
    """
    for group in order_files(files):
        if not any(files[path].strip() for path in group):
            continue
        yield "".join(path_comment(path) + files[path] + ("" if files[path].endswith("\n") else "\n") for path in group)


# ---------------------------------------------------------------------------------------------- filters

_PROSE = {"md", "markdown", "rst", "txt", "tex", "adoc", "org", "html", "htm"}
_LOCK_FILES = set(
    "package-lock.json npm-shrinkwrap.json yarn.lock pnpm-lock.yaml bun.lock deno.lock poetry.lock pipfile.lock "
    "pdm.lock uv.lock pixi.lock conda-lock.yml cargo.lock composer.lock gemfile.lock go.sum go.work.sum mix.lock "
    "pubspec.lock podfile.lock package.resolved packages.lock.json project.assets.json gradle.lockfile flake.lock "
    ".terraform.lock.hcl".split()
)  # fmt: skip
_MADE_NAMES = re.compile(
    r"(_pb2(_grpc)?\.pyi?|\.pb(\.gw)?\.(go|cc|h)|_grpc\.pb\.go|(_grpc)?_pb\.(js|d\.ts)|\.(g|freezed)\.dart"
    r"|\.(g|designer)\.cs|\.min\.(js|mjs|css)|\.(js|css)\.map)$"
)
_BLOCKS = {"//": ("/*", "*/"), "/*": ("/*", "*/"), "--": ("/*", "*/"), "<!--": ("<!--", "-->"), "(*": ("(*", "*)")}
_AUTO = r"(?:auto(?:matically)?[- ]?|machine[- ])"
_DO_NOT = r"do(?: not|n't) (?:edit|modify|change)"
# What a generator writes about its own file. "Generated" alone is also a word of hand-written comments.
_MADE_MARKS = re.compile(
    r"^(?:this file is (?:automatically )?)?@generated\b"
    rf"|\bgenerated\b.*\b{_DO_NOT}\b|\b{_DO_NOT}\b.*\bgenerated\b"
    r"|^this (?:\w+ )?(?:file|code|source|header)(?: file| code)? (?:is|was|has been) (?:an )?"
    rf"(?:{_AUTO}generated\b|generated (?:automatically|(?:by|from|with|using))\b)"
    rf"|^(?:this is an? )?{_AUTO}generated(?: (?:by|from|with|using)\b|(?: (?:file|code))?[ .!,:;]*$)"
    r"|^code generated (?:by|from)\b"
    r"|^(?:please )?do not edit(?: (?:this|the) file\b|(?: it)? (?:manually|by hand|directly)\b|[ .!]*$)"
)
# "Generated by Django 4.2", as the first thing in a file; "generated by the parser" is somebody's explanation.
_MADE_HEADER = re.compile(r"^(?:file )?generated (?:by|from|with|using) (?!(?:the|an?|this|our|its|hand)\b)")
_MADE_LINES = 20


def is_generated(path: str, text: str) -> str | None:
    """Why a file looks made by a program and not written by a person, or None.

    By its name (lock files, protobuf, .min.js), by a comment in its first 20 lines that says so (in a string or in code
    the words mean nothing), or by its shape: DeepSeek-Coder's own limits (arXiv:2401.14196 §2.1), a mean line of more
    than 100 characters, a line of more than 1,000, or fewer than 25 % letters. The two limits on lines are not for
    prose, where a paragraph may be one line.
    """
    name = path.rpartition("/")[2].lower()
    if name in _LOCK_FILES:
        return "a lock file"
    if _MADE_NAMES.search(name):
        return f"named like a generated file ({_MADE_NAMES.search(name)[0]})"
    lines = text.split("\n")
    for number, comment, is_header in _comments(name, lines[:_MADE_LINES]):
        words = comment.lower()
        opens = is_header and (number == 1 or comment[:1].isupper())  # and does not go on with a sentence
        if _MADE_MARKS.search(words) or opens and _MADE_HEADER.search(words):
            return f"line {number} says {comment[:80]!r}"
    if _ending(name) not in _PROSE:
        longest = max(map(len, lines))
        if longest > 1000:
            return f"a line of {longest:,} characters (more than 1,000)"
        count = len(lines) - (not lines[-1])
        mean = sum(map(len, lines)) / max(count, 1)
        if mean > 100:
            return f"lines of {mean:,.1f} characters on average (more than 100)"
    letters = sum(map(str.isalpha, text))
    if text.strip() and letters < 0.25 * len(text):
        return f"{100 * letters / len(text):.0f} % letters (fewer than 25 %)"
    return None


def _comments(name: str, lines: Iterable[str]) -> Iterator[tuple[int, str, bool]]:
    """(line number, words of a comment line, whether only comments came before) of the first lines of a file."""
    opening = _COMMENTS.get(_ending(name), (None, ""))[0]
    starts = ("#", "//", "--", ";", "%", "<!--", "/*") if opening is None else (opening,)
    block, block_end = _BLOCKS.get(opening, ("/*", "*/") if opening is None else ("", ""))
    in_block, is_header = False, True
    for number, line in enumerate(lines, start=1):
        bare = line.strip()
        if in_block or bare.startswith(starts) or block and bare.startswith(block):
            yield number, bare.strip(" \t/*#;%!<>-='\".(){}"), is_header
            rest = bare if in_block else bare.removeprefix(block)
            in_block = (in_block or bool(block) and bare.startswith(block)) and block_end not in rest
        elif bare and not bare.startswith("<?"):
            is_header = False


# --------------------------------------------------------------------------------------------- licences

PERMISSIVE = frozenset(
    "MIT MIT-0 X11 Apache-2.0 BSD-2-Clause BSD-3-Clause 0BSD ISC Unlicense CC0-1.0 PSF-2.0 Python-2.0 Zlib BSL-1.0 "
    "NCSA PostgreSQL WTFPL BlueOak-1.0.0 UPL-1.0".split()
)  # SPDX identifiers: use, change and pass on, with no more than a notice to keep

# Words that only this licence, or a notice that refers to it, is likely to have; punctuation and line breaks left out.
_LICENSES = [
    ("Apache-2.0", r"apache license version 2\.0 january 2004|licensed under the apache license version 2\.0"),
    ("MPL-2.0", r"mozilla public license version 2\.0|terms of the mozilla public license v 2\.0"),
    ("EPL-2.0", r"eclipse public license v(?:ersion)? 2\.0"),
    ("EPL-1.0", r"eclipse public license v(?:ersion)? 1\.0"),
    ("PSF-2.0", r"python software foundation license version 2"),
    ("Unlicense", r"this is free and unencumbered software released into the public domain"),
    ("CC0-1.0", r"cc0 1\.0 universal"),
    ("CC-BY-NC-4.0", r"attribution noncommercial(?: \w+)? 4\.0 international"),
    ("CC-BY-SA-4.0", r"attribution sharealike 4\.0 international"),
    ("CC-BY-4.0", r"attribution 4\.0 international"),
    ("BSL-1.0", r"boost software license version 1\.0"),
    ("BUSL-1.1", r"business source license 1\.1"),
    ("SSPL-1.0", r"server side public license version 1"),
    ("Elastic-2.0", r"elastic license 2\.0"),
    ("WTFPL", r"do what the fuck you want to public license"),
    ("Zlib", r"provided as is without any express or implied warranty in no event will the authors be held liable"),
    ("ISC", r"permission to use copy modify and(?: or)? distribute this software for any purpose with or without fee "
            r"is hereby granted provided that the above copyright notice and this permission notice appear"),
    ("0BSD", r"permission to use copy modify and(?: or)? distribute this software for any purpose with or without fee "
             r"is hereby granted the software is provided"),
    ("MIT", r"permission is hereby granted free of charge to any person obtaining a copy of this software and "
            r"associated documentation files"),
    ("BSD-2-Clause", r"redistribution and use in source and binary forms with or without modification are permitted "
                     r"provided that the following conditions are met"),
]  # fmt: skip
_GNU = re.compile(
    r"gnu (lesser |library |affero |)general public license(?: v| version| as published by the free software "
    r"foundation (?:either )?version) ?([123](?:\.[01])?)"
)
_GNU_NAMES = {"lesser ": "LGPL", "library ": "LGPL", "affero ": "AGPL", "": "GPL"}


def license_of(text: str) -> str | None:
    """SPDX identifier of the licence that a text is, or that it names in an `SPDX-License-Identifier:` line, or None.

    Of several in one text the first counts. GNU licences come without "-only" and "-or-later", which their own text
    does not decide. Of "A OR B" the permissive one is given, of "A AND B" the one that is not. A licence to which a
    condition is added (the Commons Clause) is unknown.
    """
    if match := re.search(r"SPDX-License-Identifier:[ \t]*([\w.+() -]+)", text):
        return _spdx(match[1])
    words = re.sub(r"[^a-z0-9.]+", " ", text.lower())
    words = re.sub(r" +", " ", re.sub(r"(?<!\d)\.|\.(?!\d)", " ", words))
    if "commons clause" in words:
        return None
    found = [(match.start(), name) for name, phrase in _LICENSES if (match := re.search(phrase, words))]
    if match := _GNU.search(words):
        version = match[2] if "." in match[2] else match[2] + ".0"
        found.append((match.start(), f"{_GNU_NAMES[match[1]]}-{version}"))
    if not found:
        return None
    start, name = min(found)
    terms = words[start : start + 3000]
    if name == "MIT" and "shall be used for good not evil" in terms:
        return "JSON"
    if name == "MIT" and "shall be included in all copies" not in terms[:2000]:
        if "redistributions of source code must retain" in terms[:2000]:
            return "NCSA"
        return "MIT-0" if "furnished to do so the software is provided as is" in terms[:2000] else None
    if name == "BSD-2-Clause" and "all advertising materials" in terms:
        return "BSD-4-Clause"
    if name == "BSD-2-Clause" and re.search(r"neither the names? |may not be used to endorse or promote", terms):
        return "BSD-3-Clause"
    return name


def _spdx(expression: str) -> str | None:
    """'(MIT OR GPL-2.0-or-later)' -> 'MIT'; brackets and exceptions are left out."""
    alternatives = []
    for choice in re.split(r"\s+OR\s+", re.sub(r"[()]|\s+WITH\s+[\w.-]+", " ", expression).strip(), flags=re.I):
        words = [name.split() for name in re.split(r"\s+AND\s+", choice, flags=re.I)]
        names = [re.sub(r"(-only|-or-later|\+)$", "", name[0]) for name in words if name]
        alternatives += sorted(names, key=lambda name: name in PERMISSIVE)[:1]
    return min(alternatives, key=lambda name: name not in PERMISSIVE, default=None)


_LICENSE_NAME = re.compile(r"(licen[sc]es?|copying)([-_. ]|$)", re.I)


def repository_license(root: Path) -> str | None:
    """SPDX identifier of a folder by its LICENSE*, LICENCE* and COPYING* files, in any case; None when unknown.

    The file with the shortest name must be known; of several known licences the first that is not permissive counts,
    since only a person can tell "either" from "both".
    """
    try:
        paths = [path for path in root.iterdir() if _LICENSE_NAME.match(path.name) and path.is_file()]
        paths = [path for path in paths if not _language(path.name)]  # license.go is somebody's code
        texts = [path.read_bytes().decode("utf-8", "replace") for path in sorted(paths, key=_by_length)]
    except OSError as error:
        raise DataError(f"the licence of {str(root)!r} cannot be read: {error}. Is it a folder you may read?") from None
    names = [license_of(text) for text in texts]
    if not names or names[0] is None:
        return None
    return next((name for name in names if name and name not in PERMISSIVE), names[0])


def _by_length(path: Path) -> tuple[int, str]:
    return len(path.name), path.name


# -------------------------------------------------------------------------------------------- .gitignore


def ignored_by_git(root: Path) -> Callable[[str], bool]:
    """A function: relative path of a file below `root` -> whether .gitignore files exclude it (as `git check-ignore`).

    Counted are the files of `root`, of the folders below it, and of those above up to the one that holds .git (none
    above without one). The nearest file decides, and in it the last pattern; nothing is taken back in ("!") from a
    folder that is excluded. `root` itself is wanted, whatever the folders above say of it. A .gitignore is read when
    the first path beside or below it is asked for, once; DataError if it cannot be. The user's own excludes file and
    .git/info/exclude are not looked at.
    """
    root = root.resolve()
    above = [root, *root.parents]
    depth = next((i for i, folder in enumerate(above) if (folder / ".git").exists()), 0)
    top = above[depth]
    start = root.relative_to(top).parts
    rules: dict[tuple[str, ...], list] = {}
    excluded: dict[tuple[str, ...], bool] = {}

    def is_excluded(parts: tuple[str, ...], is_folder: bool) -> bool:
        for length in range(len(parts) - 1, -1, -1):
            folder = parts[:length]
            if folder not in rules:
                rules[folder] = _read_gitignore(top.joinpath(*folder, ".gitignore"))
            name = "/".join(parts[length:]) + "/" * is_folder
            for pattern in reversed(rules[folder]):
                # pathspec's expression of a folder also takes what is below; here only the whole name is a match.
                if any(match.end() == len(name) for match in pattern.regex.finditer(name)):
                    return pattern.include
        return False

    def is_ignored(path: str) -> bool:
        parts = start + PurePosixPath(path).parts
        for length in range(len(start) + 1, len(parts)):  # from the first folder below root
            folder = parts[:length]
            if folder not in excluded:
                excluded[folder] = is_excluded(folder, is_folder=True)
            if excluded[folder]:
                return True
        return is_excluded(parts, is_folder=False)

    return is_ignored


def _read_gitignore(path: Path) -> list:
    """Patterns of one .gitignore, in order, as pathspec compiles them; none where there is no such file."""
    from pathspec import GitIgnoreSpec

    try:
        text = path.read_bytes().decode("utf-8-sig", "surrogateescape") if path.is_file() else ""
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}. Mend its permissions, or leave its folder out") from None
    patterns = []
    for line in text.split("\n"):
        # "a/**" is everything below a: said so that its expression, too, ends where the name ends.
        line = re.sub(r"/\*\*(/?)$", r"/**/*\1", line.removesuffix("\r"))
        try:
            patterns += GitIgnoreSpec.from_lines([line]).patterns
        except ValueError:  # a lone backslash at the end: git matches nothing with it either
            continue
    return [pattern for pattern in patterns if pattern.include is not None]
