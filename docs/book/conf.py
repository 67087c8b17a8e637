"""How Sphinx builds the book. `scripts/book` copies the pages into one folder beside this file, and then calls it.

Notebooks are shown with their stored outputs and never run. A warning is an error, links within the book included.
Formulas need MathJax, which readers load from its own server; everything else is in the site.
"""

from mpkit import __version__

project = "mpkit"
author = "The mpkit authors"
project_copyright = author
version = release = __version__
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "scripts.book.docstrings",
]

# Pages and notebooks
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # headings are linked as on GitHub

# The API reference
default_role = "code"  # docstrings write `code` as Markdown does
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autosummary_generate = True
autosummary_ignore_module_all = False
napoleon_numpy_docstring = False
# Attributes are a list: `Plan.zero` is both an attribute and a way to make a plan, and gets one entry, not two.
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
add_module_names = False
templates_path = ["_templates"]
highlight_language = "text"  # of drawings; examples and notebooks say that they are Python

# What it looks like
html_theme = "pydata_sphinx_theme"
html_title = "mpkit"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {"index": []}
html_context = {"default_mode": "auto"}  # light or dark as the system prefers, until the reader chooses
html_theme_options = {
    "logo": {"text": "mpkit"},
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}
