# Checks ptxas's output for Hopper's kernels (kernels/flash_hopper_*_bf16.cu): no spill, no serialized wgmma,
# and the registers with which a thread starts. The kernels for f16 differ only in the type. Of
# the kernels for f32 on CUDA cores only `spilling` spill. Their launch bounds limit the registers.
#   cmake -DSOURCE=<source tree of tandem> -DNVCC=<nvcc> -DWORK=<a folder> -P ptxas.cmake
# Of the messages about wgmma (C75xx) only C7519 is harmless: ptxas has inserted a wgmma.fence.
cmake_minimum_required(VERSION 3.24)
# Kernel, warpgroups that multiply (0: one kernel for all), registers. setmaxnreg distributes registers *
# threads.
set(table "forward_hopper 1 232" "forward_hopper 2 168" "forward_hopper 3 128" "hopper_backward 0 168")
file(GLOB files "${SOURCE}/kernels/flash_hopper_*_bf16.cu")
if(NOT files)
  message(FATAL_ERROR "no kernels/flash_hopper_*_bf16.cu in ${SOURCE}")
endif()
file(MAKE_DIRECTORY "${WORK}")

# Sets `said`, ptxas's output.
macro(compile file)
  execute_process(COMMAND "${NVCC}" -std=c++17 -O3 "-I${SOURCE}" "-I${SOURCE}/impl" -arch=sm_90a -cubin -Xptxas=-v
                          -o "${WORK}/kernels.cubin" "${file}"
                  OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${file} does not compile:\n${said}")
  endif()
endmacro()

foreach(file IN LISTS files)
  compile("${file}")
  string(REGEX MATCHALL "[0-9]+ bytes spill stores, [0-9]+ bytes spill loads" spills "${said}")
  string(REGEX MATCHALL "entry function '[^']+'|Used [0-9]+ registers" functions "${said}")
  foreach(text IN LISTS functions)
    if(text MATCHES "flash_(forward_hopper|hopper_backward)I[^L]*Li([0-9]+)E(Li([0-9])E)?")
      math(EXPR groups "0${CMAKE_MATCH_4}")
      set(kernel "${CMAKE_MATCH_1} ${groups}")
      set(width "${CMAKE_MATCH_2}")
    elseif(text MATCHES "Used ([0-9]+) reg")
      if(NOT "${kernel} ${CMAKE_MATCH_1}" IN_LIST table)
        message(FATAL_ERROR "${kernel}, head size ${width}: ${CMAKE_MATCH_1} registers, not as in: ${table}")
      endif()
    endif()
  endforeach()
  string(REGEX MATCHALL "\\(C75[0-9][0-9]\\)[^\n]*" notes "${said}")
  list(FILTER notes EXCLUDE REGEX "^\\(C7519\\)")
  list(LENGTH spills kernels)
  list(FILTER spills EXCLUDE REGEX "^0 bytes spill stores, 0 ")
  message(STATUS "${file}: ${kernels} kernels")
  if(kernels EQUAL 0 OR spills OR notes)
    list(JOIN notes "\n" notes)
    message(FATAL_ERROR "${file}: ${kernels} kernels; spills: ${spills}; wgmma:\n${notes}")
  endif()
endforeach()

set(spilling "forward 64 " "backward 64 1")
foreach(pass forward backward)
  compile("${SOURCE}/kernels/flash_${pass}_f32.cu")
  string(REGEX MATCHALL "entry function '[^']+'|[0-9]+ bytes spill stores" facts "${said}")
  set(kernels 0)
  foreach(text IN LISTS facts)
    if(text MATCHES "f32ILi([0-9]+)E(Lb([01])E)?")
      set(kernel "${pass} ${CMAKE_MATCH_1} ${CMAKE_MATCH_3}")
      math(EXPR kernels "${kernels} + 1")
    elseif(text MATCHES "^[1-9]" AND NOT kernel IN_LIST spilling)
      message(FATAL_ERROR "flash_${pass}_f32.cu, kernel ${kernel}: ${text}")
    endif()
  endforeach()
  message(STATUS "flash_${pass}_f32.cu: ${kernels} kernels")
  if(kernels EQUAL 0)
    message(FATAL_ERROR "flash_${pass}_f32.cu: no kernels in\n${said}")
  endif()
endforeach()
