"""What users call, one public function a module; ``ebbtide/__init__.py`` is the page that lists them."""
