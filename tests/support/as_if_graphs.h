/** A CPU that has graphs, as if: what is captured runs at once, and a launch runs nothing more. So a graph is
 * right the first time, and who takes part in it is called as in any other. For tests that wrap
 * td_backend_cpu and td_device_kind_of. */
#ifndef TD_TESTS_AS_IF_GRAPHS_H
#define TD_TESTS_AS_IF_GRAPHS_H

/** Devices that are opened from here on have them. */
void td_as_if_graphs(void);

/** The next question for the kind of a device is answered as for a GPU: td_train_create begins with it, where
 * steps are to be captured. */
void td_as_if_gpu_once(void);

/** The next end of a capture fails, as on a GPU where a call before it has spoiled the capture. */
void td_as_if_capture_fails_once(void);

/** Launches since the call before. */
int td_as_if_launches(void);

#endif
