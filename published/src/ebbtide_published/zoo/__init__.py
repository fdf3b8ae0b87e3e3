"""The papers' models, sized by arguments: ``zoo:NAME`` on the command line, or the function of its module."""
