"""What users call, one public function a module; ``ebbflow/__init__.py`` is the page that lists them."""
