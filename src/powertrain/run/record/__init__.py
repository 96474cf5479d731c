"""What a run keeps: journal, lease, run.json, milestones."""
