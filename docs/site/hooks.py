"""Extend MkDocs for this book.

* docs/index.md is the first page. The README and every linked file of the repository becomes a page, too. Python has its prose
  next to its code (annotate.py), notebooks with their outputs. So links of a code-hosting page work on the site, too.
* Formulas ($...$ and $$...$$) become MathML, which browsers draw by themselves.
* A lesson's first use of a glossary term links to the glossary.
* `<!-- microscope: NAME -->` becomes a microscope (recipes/page); without JavaScript the tables remain.
* After a link to a switch of docs/train.html, the page can be opened in place (recipes/browser).
"""

from __future__ import annotations

import html
import json
import os
import posixpath
import re
import sys
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File
from mkdocs.structure.nav import Navigation

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
from annotate import annotated  # noqa: E402

from agent_r1_recipes.page.lessons import lesson_steps  # noqa: E402

LINK = re.compile(r"(?<=\]\()([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
FENCE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence) *$", re.MULTILINE | re.DOTALL)
MICROSCOPE = re.compile(r"<!-- microscope: (\w+) -->")
SCRIPTS = ("js/quantities.js", "js/microscope.js", "js/group.js")
ORIGIN: dict[str, str] = {}
"""Page of the site -> its file of the repository."""


def on_config(config):
    config["nav"] = [*config["nav"], {"Source": ["code/index.md"]}]
    return config


def on_files(files, config):
    """Add a page for each linked file of the repository, recursively."""
    ORIGIN.clear()
    for file in files.documentation_pages():
        ORIGIN[file.src_uri] = "docs/" + file.src_uri
    path = reading_path()
    waiting = ["README.md", "one_file.py", *path]
    waiting += [target for origin in list(ORIGIN.values()) for target in targets(origin)]
    while waiting:
        origin = waiting.pop()
        page = page_of(origin)
        if page in ORIGIN or (origin.startswith("docs/") and files.get_file_from_path(page)):
            continue
        ORIGIN[page] = origin
        files.append(File.generated(config, page, content=written(origin)))
        waiting += targets(origin)
    files.append(File.generated(config, "code/index.md", content=contents(path)))
    for name in (*SCRIPTS, "microscope.css"):
        content = (ROOT / "recipes/page" / name).read_text()
        files.append(File.generated(config, f"site/{posixpath.basename(name)}", content=content))
    ORIGIN["code/index.md"] = "README.md"
    return files


def reading_path() -> list[str]:
    """Return the files of the README's reading path, in order."""
    text = (ROOT / "README.md").read_text()
    table = text.split("## Read it in this order")[1].split("\n## ")[0]
    return list(dict.fromkeys(re.findall(r"\((src/agent_r1/[\w/]+\.py)\)", table)))


def contents(path: list[str]) -> str:
    lines = [
        "# The annotated source",
        "",
        "The source with its prose next to the code, in the order of the reading path.",
        "Begin with [one_file.py](one_file.py): the whole idea in one file.",
        "",
    ]
    lines += [f"{i}. [{name.removeprefix('src/agent_r1/')}]({name})" for i, name in enumerate(path, 1)]
    others = sorted(o for o in ORIGIN.values() if o.endswith(".py") and o not in path)
    return "\n".join([*lines, "", "Other files that pages link to:", "", *(f"- [{name}]({name})" for name in others)])


def page_of(origin: str) -> str:
    """Return the site's page of a file of the repository."""
    if origin.startswith("docs/"):
        return origin.removeprefix("docs/")
    return f"code/{origin}" if origin.endswith(".md") else f"code/{origin}.md"


def targets(origin: str) -> list[str]:
    """Find the files of the repository that a file links to."""
    if not origin.endswith((".md", ".ipynb")):
        return []
    found = (resolved(origin, link) for link, _ in LINK.findall((ROOT / origin).read_text()))
    return [target for target in found if target]


def resolved(origin: str, link: str) -> str | None:
    """Return the file of the repository at a relative link, or None."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    return target if not link.startswith("/") and not target.startswith("..") and (ROOT / target).exists() else None


def written(origin: str) -> str:
    """Write the Markdown page of a file outside docs/."""
    path = ROOT / origin
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if p.suffix in (".py", ".md", ".yaml"))
        return "\n".join([f"# {origin}", "", *(f"- `{name}`" for name in names)])
    text = path.read_text()
    if path.suffix == ".md":
        return text
    if path.suffix == ".py":
        return annotated(text, origin)
    if path.suffix == ".ipynb":
        return notebook(json.loads(text), origin)
    return f"# {origin}\n\n~~~~{ {'.yaml': 'yaml', '.sh': 'bash', '.json': 'json'}.get(path.suffix, 'text') }\n{text}\n~~~~\n"


def notebook(book: dict, origin: str) -> str:
    parts = [f"*The notebook `{origin}`.*"]
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"~~~~python\n{source}\n~~~~")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/svg+xml" in data:
                parts.append(f"<div>{''.join(data['image/svg+xml'])}</div>")
            elif "image/png" in data:
                parts.append(f'<img alt="output" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">')
            elif "text/html" in data:
                parts.append(f"<div>{''.join(data['text/html'])}</div>")
            else:
                parts.append(f"~~~~text\n{''.join(data['text/plain'])}\n~~~~")
    return "\n\n".join(parts)


def on_page_markdown(markdown, page, config, files):
    """Turn links to files of the repository into links to pages, except in fenced blocks."""
    here = page.file.src_uri
    origin = ORIGIN[here]

    def moved(match: re.Match) -> str:
        target = resolved(origin, match[1])
        if target is None:
            return match[0]
        to = page_of(target) if target != "docs" else "index.md"
        return posixpath.relpath(to, posixpath.dirname(here) or ".") + match[2]

    pieces, end = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [LINK.sub(moved, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, LINK.sub(moved, markdown[end:])])


VERBS_TOO = {
    "recipe": r"(?<!of the )recipes?",
    "return": r"(?<=the )returns?",
    "value": r"(?<!keys and )values?",
    "step": r"(?<!one )steps?",
}
"""Glossary terms with other meanings: a pattern of the uses in the glossary's meaning."""
NOT_PROSE = ("a", "code", "pre", "math", "h1", "h2", "h3", "summary", "span")


def glossary() -> dict[str, tuple[str, str]]:
    """Map each term of the glossary, in order, to its anchor and its pattern."""
    found = {}
    for cell in re.findall(r"^- \*\*(.+?)\*\*: ", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE):
        for word in cell.split(", "):
            plain = re.escape(word) + "s?" if word == word.lower() else re.escape(word)
            anchor = re.sub(r"\W+", "-", cell.lower()).strip("-")
            found[word] = anchor, VERBS_TOO.get(word, plain if word.isupper() else f"(?i:{plain})")
    return found


def with_words(content: str) -> str:
    """Link the first use of each glossary term in a lesson's prose."""
    words = sorted(glossary().items(), key=lambda item: -len(item[0]))  # "action mask" before "action"
    looks = re.compile("|".join(rf"(?P<w{n}>\b(?:{look})\b)" for n, (_, (_, look)) in enumerate(words)))
    seen: set[str] = set()

    def linked(match: re.Match) -> str:
        anchor = words[int(match.lastgroup[1:])][1][0]
        if anchor in seen:
            return match[0]
        seen.add(anchor)
        return f'<a class="word" href="../glossary.html#{anchor}">{match[0]}</a>'

    out, inside = [], 0
    for piece in re.split(r"(<[^>]*>)", content):
        if tag := re.match(r"<(/?)(\w+)", piece):
            inside += (tag[2] in NOT_PROSE) * (-1 if tag[1] else 1)
        out.append(piece if inside or piece.startswith("<") else looks.sub(linked, piece))
    return "".join(out)


def with_anchors(content: str) -> str:
    """Give each entry of the glossary's HTML an anchor."""
    anchors = iter(dict.fromkeys(anchor for anchor, _ in glossary().values()))
    return re.sub(r"<li>(?=<strong>)", lambda _: f'<li id="{next(anchors)}">', content)


def with_microscopes(content: str) -> str:
    """Replace each comment that names a microscope by it, and load the scripts once."""
    steps = lesson_steps(ROOT / "docs/lessons/group.jsonl")

    def widget(match: re.Match) -> str:
        data = html.escape(json.dumps(steps[match[1]], separators=(",", ":")))
        return f'<div data-step="{data}"></div>'

    drawn = MICROSCOPE.sub(widget, content)
    if drawn == content:
        return content
    loads = [f'<script src="../site/{posixpath.basename(name)}"></script>' for name in SCRIPTS]
    return "\n".join([drawn, (ROOT / "recipes/page/microscope.html").read_text(), *loads])


def with_switches(content: str) -> str:
    """Let the reader open the training page after a link to one of its switches."""

    def opened(match: re.Match) -> str:
        frame = f'<iframe loading="lazy" src="{match[1]}" title="The agent learns in this page"></iframe>'
        return f'{match[0]}\n<details class="switch"><summary>Open it here</summary>{frame}</details>'

    return re.sub(r'<p>(?:(?!</p>).)*href="(\.\./train\.html#switch=[\w-]+)".*?</p>', opened, content, flags=re.DOTALL)


def on_page_content(content, page, config, files):
    def formula(match: re.Match) -> str:
        display = match["tag"] == "div"
        tex = html.unescape(match["tex"]).strip()[2:-2]
        return (
            f'<{match["tag"]} class="formula">{convert(tex, display="block" if display else "inline")}</{match["tag"]}>'
        )

    # In a cell `\|` is a code-hosting page's way to write a bar in code; here the backslash would be seen.
    content = re.sub(r"<td[^>]*>.*?</td>", lambda cell: cell[0].replace("\\|", "|"), content)
    content = re.sub(
        r'<(?P<tag>div|span) class="arithmatex">(?P<tex>.*?)</(?P=tag)>', formula, content, flags=re.DOTALL
    )
    if page.file.src_uri == "glossary.md":
        return with_anchors(content)
    return with_switches(with_microscopes(with_words(content))) if re.match(r"lessons/\d", page.file.src_uri) else content


def on_nav(nav: Navigation, config, files):
    """Print the pages of docs/ that the navigation in mkdocs.yml lacks."""
    named = {page.file.src_uri for page in nav.pages}
    left = sorted(uri for uri, origin in ORIGIN.items() if origin.startswith("docs/") and uri not in named)
    if left:
        print(f"not in the navigation of docs/site/mkdocs.yml, but linked and searchable: {', '.join(left)}")
    return nav


def on_post_build(config):
    """Remove the sitemap: it is useless without a site address."""
    for name in ("sitemap.xml", "sitemap.xml.gz"):
        os.unlink(Path(config["site_dir"]) / name)
