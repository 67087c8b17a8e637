"""What a diagnosis says: findings, and the Diagnosis that holds them; `mpkit.diagnosis` finds them."""
