"""The documentation builds, reaches every page, and names only what exists."""

import re
import subprocess
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[1]
LIMIT = 120  # columns
CITED = re.compile(r"identit(?:y|ies)[ _](\d+)(?: and (\d+))?|identities\.md, (\d+)")


def pages() -> list[Path]:
    """Return every Markdown file of the repository."""
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True)
    return [ROOT / name for name in files.stdout.decode().splitlines()]


def prose(text: str) -> str:
    """Return the text without its fenced blocks, with as many lines."""
    return re.sub(r"^ *```.*?^ *```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def test_the_documentation_builds_without_a_warning(tmp_path):
    """Among the warnings: a link that leads nowhere, a page that the navigation does not reach."""
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path))
    build(config)
    assert (tmp_path / "learning" / "index.html").exists()


def test_links_outside_of_the_website_lead_somewhere():
    for page in pages():
        for target in re.findall(r"\]\(([^)#:]+)\)", prose(page.read_text())):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_no_line_of_prose_is_wider_than_a_screen():
    wide = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages()
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > LIMIT and not line.lstrip().startswith("|")
    ]
    assert not wide


def test_every_identity_that_is_cited_stands_in_the_list_and_every_one_there_is_tested():
    listed = set(re.findall(r"^\| (\d+) \|", (ROOT / "docs/identities.md").read_text(), flags=re.MULTILINE))
    cited = {
        number
        for folder in ("src", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if path != Path(__file__)
        for groups in CITED.findall(path.read_text())
        for number in groups
        if number
    }
    assert len(cited) > 20
    assert cited == listed
