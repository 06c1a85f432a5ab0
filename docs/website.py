"""Hooks of MkDocs: files outside ``docs/`` to which pages link become part of the website."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[)#])")
"""Path of a link to a file of the repository, without the anchor."""

_HOME = "index.md"


def site_path(path: str) -> str:
    """Return the path on the website of a file of the repository."""
    return _HOME if path == "README.md" else path.removeprefix("docs/")


def linked_files(page: str, markdown: str) -> set[str]:
    """Return the files of the repository to which a page links.

    Args:
        page: path of the page in the repository.
        markdown: text of the page.
    """
    folder = posixpath.dirname(page)
    return {posixpath.normpath(posixpath.join(folder, link)) for link in LINK.findall(markdown)}


def with_site_links(page: str, markdown: str) -> str:
    """Return the text of a page with its links changed from paths in the repository to paths on the website."""
    folder, site_folder = posixpath.dirname(page), posixpath.dirname(site_path(page))

    def change(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[0]))
        return posixpath.relpath(site_path(target), site_folder or ".")

    return LINK.sub(change, markdown)


def on_files(files: Any, config: Any) -> Any:
    """Add every file of the repository to which a page links, directly or through other pages."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    visited = set(waiting)
    while waiting:
        page = waiting.pop()
        for path in sorted(linked_files(page, (ROOT / page).read_text()) - visited):
            visited.add(path)
            if path.startswith("docs/") or path == "README.md" or not (ROOT / path).is_file():
                continue
            files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change the links of a page."""
    return with_site_links(Path(page.file.abs_src_path).relative_to(ROOT).as_posix(), markdown)
