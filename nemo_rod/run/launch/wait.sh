# Waits for the process $1, and goes on where a signal, whose trap sets `waited`, interrupts that.
# Returns its status.
wait_for() {
  local status
  waited=no
  while [[ $waited == no ]]; do
    waited=yes
    wait "$1"
    status=$?
  done
  return "$status"
}
