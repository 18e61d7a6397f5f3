# Tests the choice of GPUs for a build (cmake/TandemArchitectures.cmake):
#   cmake -DSOURCE=<source tree of tandem> -DWORK=<a folder for a double of nvidia-smi> -P architectures.cmake
cmake_minimum_required(VERSION 3.24)
include("${SOURCE}/cmake/TandemArchitectures.cmake")

function(expect what got wanted)
  if(NOT got STREQUAL wanted)
    message(FATAL_ERROR "${what}: got '${got}', expected '${wanted}'")
  endif()
endfunction()

# Writes a double of nvidia-smi. It answers only the question of td_gpus_seen, with `answer` and exit code
# `code`.
function(pretend_smi answer code)
  file(WRITE "${WORK}/nvidia-smi" "#!/bin/sh\n"
       "[ \"$*\" = \"--query-gpu=compute_cap --format=csv,noheader\" ] || exit 99\n"
       "printf '${answer}'\nexit ${code}\n")
  file(CHMOD "${WORK}/nvidia-smi" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
endfunction()

file(MAKE_DIRECTORY "${WORK}")
pretend_smi("9.0\\n9.0\\n12.0\\n" 0)
td_gpus_seen("${WORK}/nvidia-smi" seen)
expect("two of a kind and another" "${seen}" "9.0;12.0")
pretend_smi("No devices were found\\n" 0)
td_gpus_seen("${WORK}/nvidia-smi" seen)
expect("no GPU" "${seen}" "")
pretend_smi("NVIDIA-SMI 9.0 has failed\\n" 9)
td_gpus_seen("${WORK}/nvidia-smi" seen)
expect("no driver" "${seen}" "")
td_gpus_seen("SMI-NOTFOUND" seen)
expect("no nvidia-smi" "${seen}" "")

set(known 75 80 86 89 90 100 120)
foreach(row IN ITEMS "nothing seen||90a 80-virtual" "Hopper|9.0|90a" "Blackwell|12.0|120" "Ampere and Hopper|8.0 9.0|80 90a"
                     "newer than the compiler|13.0|80-virtual" "two newer ones|13.0 14.1|80-virtual"
                     "too old|7.5|90a 80-virtual" "too old beside a good one|7.5 8.6|86")
  string(REPLACE "|" ";" row "${row}")
  list(GET row 0 name)
  list(GET row 1 capabilities)
  list(GET row 2 wanted)
  string(REPLACE " " ";" capabilities "${capabilities}")
  string(REPLACE " " ";" wanted "${wanted}")
  td_choose_architectures("${capabilities}" "${known}" chosen)
  expect("${name}" "${chosen}" "${wanted}")
endforeach()

td_architecture_flags("90a;80-virtual;120" flags)
expect("flags" "${flags}" "-gencode=arch=compute_90a,code=sm_90a;-gencode=arch=compute_80,code=compute_80;-gencode=arch=compute_120,code=sm_120")

# A refusal ends CMake, so each refusal runs in a separate process.
if(REFUSE)
  td_architecture_flags("${REFUSE}" flags)
  return()
endif()
foreach(bad IN ITEMS "native" "80-real" "75" "75-virtual" "sm_90" "90,90a")
  string(REPLACE "," ";" bad "${bad}")
  execute_process(COMMAND "${CMAKE_COMMAND}" "-DSOURCE=${SOURCE}" "-DWORK=${WORK}" "-DREFUSE=${bad}" -P
                          "${CMAKE_CURRENT_LIST_FILE}" RESULT_VARIABLE failed ERROR_VARIABLE words)
  if(NOT failed OR NOT words MATCHES "TANDEM_CUDA_ARCHITECTURES has")
    message(FATAL_ERROR "'${bad}' is not refused, or not by name: ${words}")
  endif()
endforeach()
