"""Shared by the trainers of all frameworks: ports, joining and leaving a group, reports of callbacks."""
