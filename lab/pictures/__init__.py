"""Pictures of README and pages; lab/README.md lists their commands."""
