"""The untracked-state check: finds state that training changes and nothing tracked holds."""
