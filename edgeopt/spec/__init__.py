"""Values only: profiles, projects, manifests, limits, reports. No torch, no paramiko; of files only YAML is read."""
