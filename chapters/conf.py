"""Sphinx configuration of the book as a web site: `sphinx-build -W --keep-going -b html chapters _site`.

Nothing is executed: pages show the outputs that are stored in the notebooks. Nothing is fetched: not while building, and not while
reading (MathJax lies in _static/mathjax).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the site's own extensions

project = "LLM Inference Engine from Scratch"
html_title = project
copyright = author = ""
language = "en"

extensions = [
    "myst_nb",
    "sphinx_design",
    "sphinx_copybutton",
    "site_cells",
    "site_pages",
    "site_pipeline",
    "site_reference",
]
exclude_patterns = ["_build", "_templates", "jupyter_execute", "**.ipynb_checkpoints"]

# ---- chapters
nb_execution_mode = "off"
nb_custom_formats = {".ipynb": ["site_cells.read", {}, False]}
nb_merge_streams = True
suppress_warnings = ["mystnb.unknown_mime_type"]  # the numbers beside each figure
myst_enable_extensions = [
    "alert",
    "amsmath",
    "attrs_block",
    "attrs_inline",
    "colon_fence",
    "deflist",
    "dollarmath",
]
myst_heading_anchors = 3
smartquotes_action = "qe"  # quotes and dots, not dashes: --context is an option

# ---- reference
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 72
toc_object_entries_show_parents = "hide"

# ---- looks
html_theme = "sphinx_book_theme"
html_theme_options = {
    "navbar_persistent": [],  # otherwise a second, empty bar with a second search field
    "use_fullscreen_button": False,
    "home_page_in_toc": False,
}
html_context = {"default_mode": "auto"}  # light or dark as the reader's system says
html_favicon = "_static/favicon.svg"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_copy_source = True
html_show_copyright = html_show_sphinx = False
mathjax_path = "mathjax/tex-chtml.js"
mathjax3_config = {
    "options": {"enableMenu": False},  # the menu would load more files
    "chtml": {"matchFontHeight": False, "scale": 1.08},  # else as large as the tallest system font
}
copybutton_exclude = ".linenos, .gp, .go, summary"
