"""The tools that people run around training: start it, watch it, examine it, report and export what it leaves."""
