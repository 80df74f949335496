"""An elastic world: its rules, and what an engine below them must do."""
