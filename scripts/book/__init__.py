"""`make book`: tutorials, exercises, guides and API reference as one static site, by Sphinx (docs/book/conf.py)."""
