"""What a diagnosis says: findings, and the Diagnosis that holds them; `mpkit.timeline.diagnosis` finds them."""
