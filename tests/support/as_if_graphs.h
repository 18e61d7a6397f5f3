/** A CPU with simulated graphs: a captured call runs at once, and a launch runs nothing. So a graph is right
 * once, and every call in it is made as in a real capture. For tests that wrap td_backend_cpu and
 * td_device_kind_of. */
#ifndef TD_TESTS_AS_IF_GRAPHS_H
#define TD_TESTS_AS_IF_GRAPHS_H

/** Devices that are opened after this call have graphs. */
void td_as_if_graphs(void);

/** The next question for a device's kind is answered as for a GPU. td_train_create asks it first if steps are
 * captured. */
void td_as_if_gpu_once(void);

/** The next end of a capture fails, as on a GPU if an earlier call spoiled the capture. */
void td_as_if_capture_fails_once(void);

/** The number of launches since the last call. */
int td_as_if_launches(void);

#endif
