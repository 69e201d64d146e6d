"""Settings of the site: `make docs` builds this folder into build/docs, offline, and a warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

import adatape

sys.path.insert(0, str(Path(__file__).parent))
from site_pages import CONTENTS

project, author = "adatape", "The adatape authors"
copyright = "The adatape authors, Apache-2.0"
release = version = adatape.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "site_pages"]
exclude_patterns = ["images", "static"]
default_role = "code"  # docstrings write names between single backticks
add_module_names = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["misc.highlighting_failure"]  # blocks of shell may hold an ellipsis

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # seconds of a cell; a busy machine is not an error
nb_merge_streams = True
nb_output_stderr = "remove"  # warnings of other packages, which name folders of the machine
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # its defaults are fetched from other hosts

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100

html_theme = "pydata_sphinx_theme"
html_title = "adatape"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {page: [] for page in ["index", *CONTENTS["index"]] if page != "guides"}
html_theme_options = {
    "logo": {"text": "adatape"},
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
}
